"""etcd, API server, controller manager and scheduler as processes of this machine."""

from __future__ import annotations

import base64
import secrets
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.cluster.harness import build, pki, state
from tests.cluster.harness.api import Api
from tests.cluster.harness.audit import AuditLog
from tests.cluster.harness.audit import policy as audit_policy
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.processes import Process
from tests.cluster.harness.waiting import wait_until
from tests.ports import find_free_port

ADMIN = "admin"
CONTROLLER_MANAGER = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
KUBE_PROXY = "system:kube-proxy"
KUBE_ROUTER = "radixgrove:kube-router"
KWOK = "radixgrove:kwok"

# Seconds of silence after which a node is lost; pretended nodes renew their leases every 10 s.
NODE_GRACE = 16
PRETENDED_NODE_GRACE = 50

# The groups of users that have a static token; the user names hit the built-in roles.
_GROUPS = {
    ADMIN: "system:masters",
    CONTROLLER_MANAGER: "",
    SCHEDULER: "",
    KUBE_PROXY: "",
    KUBE_ROUTER: "",
    KWOK: "system:masters",
}


def node_user(node: str) -> str:
    """The user name by which the Node authorizer knows a kubelet."""
    return f"system:node:{node}"


class ControlPlane:
    """A Kubernetes without nodes: enough for CRDs, RBAC, controllers' objects and admission.

    A context manager. On the loopback it needs no privileges, and any number may run at once.
    `nodes` names the kubelets that will get credentials. Raises `build.BuildError`.
    """

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        service_range: str = "10.249.0.0/24",
        nodes: Sequence[str] = (),
        owner: state.StateDirectory | None = None,
    ) -> None:
        self.address = address
        self.service_range = service_range
        self._nodes = nodes
        self._owner = owner
        self._owned: state.StateDirectory | None = None
        self._processes: list[Process] = []
        self._api: Api | None = None

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Builds what is missing, starts everything and waits until it serves."""
        self._programs = build.ensure(build.CONTROL_PLANE)
        if self._owner is None:
            state.sweep()
            self._owned = state.StateDirectory.claim(f"control-plane-{secrets.token_hex(4)}")
            if self._owned is None:
                raise state.StateError("a fresh name is already taken")
        try:
            self._prepare()
            self._start_processes()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the processes and removes the state, unless that belongs to a cluster."""
        if self._api is not None:
            self._api.close()
        for process in self._processes:
            process.kill()
        if self._owned is not None:
            self._owned.remove()
            self._owned = None

    @property
    def path(self) -> Path:
        """The state directory."""
        owner = self._owner or self._owned
        if owner is None:
            raise RuntimeError("the control plane is not running")
        return owner.path

    @property
    def kubeconfig(self) -> Path:
        """Credentials of a member of system:masters."""
        return self.kubeconfig_of(ADMIN)

    def kubeconfig_of(self, user: str) -> Path:
        """The kubeconfig of one of the users that have a static token."""
        return self.path / "kubeconfigs" / f"{user.replace(':', '-')}.yaml"

    @property
    def kubectl(self) -> Kubectl:
        """kubectl as cluster administrator."""
        return Kubectl(self._programs / "kubectl", self.kubeconfig, self._api)

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig with a fresh token (24 h) of an existing service account."""
        token = self.kubectl.run("create", "token", name, "-n", namespace, "--duration=24h")
        return self._write_kubeconfig(f"{namespace}-{name}", token.strip())

    def _prepare(self) -> None:
        self.authority = pki.Authority(self.path / "pki")
        first_service = self.service_range.rpartition(".")[0] + ".1"
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
        self._serving = self.authority.issue_server(
            "apiserver", [*names, self.address, first_service]
        )
        self._kubelet_client = self.authority.issue_client(
            "apiserver-kubelet-client", "system:masters"
        )
        self._signing_key = self.path / "pki" / "service-accounts.key"
        self._verification_key = self.path / "pki" / "service-accounts.pub"
        pki.new_signing_key(self._signing_key, self._verification_key)
        self.port = find_free_port(self.address)
        self._etcd_url = f"http://127.0.0.1:{find_free_port('127.0.0.1')}"
        self._etcd_peer_url = f"http://127.0.0.1:{find_free_port('127.0.0.1')}"
        self._write_credentials()
        self.audit = AuditLog(self.path / "audit.log")
        self.audit.path.touch()
        policy = audit_policy(user for user in _GROUPS if user != ADMIN)
        (self.path / "audit-policy.yaml").write_text(yaml.safe_dump(policy))

    def _write_credentials(self) -> None:
        groups = _GROUPS | {node_user(node): "system:nodes" for node in self._nodes}
        bearers = {user: secrets.token_hex(16) for user in groups}
        for user, token in bearers.items():
            self._write_kubeconfig(user, token)
        tokens = self.path / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(
            "".join(f'{bearers[u]},{u},{u},"{group}"\n' for u, group in groups.items())
        )
        self._api = Api(self.address, self.port, self.authority.certificate, bearers[ADMIN])

    def _write_kubeconfig(self, user: str, token: str) -> Path:
        path = self.kubeconfig_of(user)
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o600)
        cluster = {
            "server": f"https://{self.address}:{self.port}",
            "certificate-authority-data": _base64(self.authority.certificate),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "radixgrove", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [
                {"name": "radixgrove", "context": {"cluster": "radixgrove", "user": user}}
            ],
            "current-context": "radixgrove",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def _start_processes(self) -> None:
        self.etcd = self._process("etcd", self._etcd_flags())
        self.api_server = self._process("kube-apiserver", self._api_server_flags())
        self.controller_manager = self._process(
            "kube-controller-manager", self._controller_manager_flags()
        )
        self.scheduler = self._process(
            "kube-scheduler",
            [
                f"--kubeconfig={self.kubeconfig_of(SCHEDULER)}",
                "--leader-elect=false",
                "--secure-port=0",
            ],
        )
        self.etcd.start()
        wait_until(lambda: self._healthy(self.etcd, f"{self._etcd_url}/health"), "etcd serves")
        self.api_server.start()
        self.wait_until_serving()
        self.controller_manager.start()
        self.scheduler.start()
        self.kubectl.wait_for(
            "serviceaccount", "default", "-n", "default", that=bool, what="exists"
        )

    def wait_until_serving(self) -> None:
        """Waits until the API server answers that it is ready, e.g. after a restart."""
        url = f"https://{self.address}:{self.port}/readyz"
        wait_until(lambda: self._healthy(self.api_server, url), "the API server serves")

    def _process(self, name: str, flags: Sequence[str]) -> Process:
        process = Process(name, [str(self._programs / name), *flags], state=self.path)
        self._processes.append(process)
        return process

    def _healthy(self, process: Process, url: str) -> bool:
        process.check()
        context = None
        if url.startswith("https"):
            context = ssl.create_default_context(cafile=str(self.authority.certificate))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with opener.open(url, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _etcd_flags(self) -> list[str]:
        return [
            f"--data-dir={self.path / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={self._etcd_peer_url}",
            f"--initial-advertise-peer-urls={self._etcd_peer_url}",
            f"--initial-cluster=default={self._etcd_peer_url}",
            "--unsafe-no-fsync",
        ]

    def _api_server_flags(self) -> list[str]:
        flags = [
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self._serving.certificate}",
            f"--tls-private-key-file={self._serving.key}",
            f"--service-cluster-ip-range={self.service_range}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--token-auth-file={self.path / 'tokens.csv'}",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._verification_key}",
            f"--service-account-signing-key-file={self._signing_key}",
            f"--kubelet-client-certificate={self._kubelet_client.certificate}",
            f"--kubelet-client-key={self._kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--audit-policy-file={self.path / 'audit-policy.yaml'}",
            f"--audit-log-path={self.audit.path}",
        ]
        if self.address.startswith("127."):
            # An endpoint slice refuses loopback addresses.
            flags.append("--endpoint-reconciler-type=none")
        return flags

    def _controller_manager_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig_of(CONTROLLER_MANAGER)}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--service-account-private-key-file={self._signing_key}",
            f"--root-ca-file={self.authority.certificate}",
            "--use-service-account-credentials",
            f"--node-monitor-grace-period={NODE_GRACE if self._nodes else PRETENDED_NODE_GRACE}s",
            "--node-monitor-period=2s",
            # Of each controller; with the default of 20 a second, garbage waits for its turn.
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            # A claim that is seen before its volume waits for the next of these looks.
            "--pvclaimbinder-sync-period=1s",
        ]


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
