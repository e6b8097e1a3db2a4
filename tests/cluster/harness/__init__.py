"""A real Kubernetes on one machine, for tests and demonstrations.

Every node is a network namespace with its own containerd, kubelet and kube-proxy; the control
plane runs beside them on a bridge. Nothing is imitated but the GPUs, which the nodes merely
advertise.
"""
