{{- define "radixgrove.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "radixgrove.labels" -}}
app.kubernetes.io/name: radixgrove
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "radixgrove.metadata-labels" -}}
{{ include "radixgrove.labels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /*
One image: registry, repository, and a digest or else a tag. A repository with a host as its first part
(it has a dot or a port, or is localhost) names its registry itself.
*/ -}}
{{- define "radixgrove.image" -}}
{{- $image := index .root.Values.image .name -}}
{{- $registry := .root.Values.image.registry | default "" | trimSuffix "/" -}}
{{- $path := $image.repository -}}
{{- $hosted := regexMatch "^(localhost|[^/]*[.:][^/]*)/" $path -}}
{{- if and $registry (not $hosted) -}}{{- $path = printf "%s/%s" $registry $path -}}{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $path $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $path ($image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "radixgrove.keys" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "radixgrove.fullname" .)) -}}
{{- end -}}

{{- define "radixgrove.redis-url" -}}
{{- if .Values.redis.url -}}
{{- .Values.redis.url -}}
{{- else if .Values.redis.enabled -}}
{{ if .Values.redis.tls.secret }}rediss{{ else }}redis{{ end }}://:{password}@{{ include "radixgrove.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- end -}}
{{- end -}}

{{- /* Bytes of a size as Kubernetes (`1536Mi`) or Redis (`1gb`) writes it. */ -}}
{{- define "radixgrove.bytes" -}}
{{- $units := dict "k" 1e3 "kb" 1024 "ki" 1024 "m" 1e6 "mb" 1048576 "mi" 1048576 "g" 1e9 "gb" 1073741824 "gi" 1073741824 "t" 1e12 "ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]+$" . | lower -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (index $units $unit | default 1 | float64) -}}
{{- end -}}

{{- define "radixgrove.pod-security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "radixgrove.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Chart-wide defaults of a pod spec, and under them those of its kind (`own`, perhaps none). */ -}}
{{- define "radixgrove.pod-defaults" -}}
{{- $values := .root.Values -}}
{{- $own := .own | default dict -}}
{{- with concat ($values.image.pullSecrets | default list) ($own.imagePullSecrets | default list) | uniq }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with concat ($values.pods.tolerations | default list) ($own.tolerations | default list) }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with merge dict ($own.nodeSelector | default dict) ($values.pods.nodeSelector | default dict) }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName | default $values.pods.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The CA bundle in pods of the chart's own, which need it for a Redis behind TLS. */ -}}
{{- define "radixgrove.ca-env" -}}
{{- if .Values.pods.caBundle -}}
- {name: SSL_CERT_FILE, value: /etc/radixgrove-ca/ca.crt}
{{- end -}}
{{- end -}}

{{- define "radixgrove.ca-mount" -}}
{{- if .Values.pods.caBundle -}}
- {name: ca, mountPath: /etc/radixgrove-ca, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "radixgrove.ca-volume" -}}
{{- with .Values.pods.caBundle -}}
- name: ca
  configMap: {name: {{ . | quote }}}
{{- end -}}
{{- end -}}

{{- define "radixgrove.proxy" -}}
{{- $env := dict -}}
{{- with .Values.pods.proxy.http -}}{{- $_ := set $env "HTTP_PROXY" . -}}{{- end -}}
{{- with .Values.pods.proxy.https -}}{{- $_ := set $env "HTTPS_PROXY" . -}}{{- end -}}
{{- with .Values.pods.proxy.noProxy -}}{{- $_ := set $env "NO_PROXY" . -}}{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{- define "radixgrove.key-env" -}}
{{- $secret := include "radixgrove.keys" . -}}
{{- range $name, $key := dict "RADIXGROVE_INTERNAL_KEY" "internal-key" "RADIXGROVE_CLUSTER_SECRET" "cluster-secret" "RADIXGROVE_MANAGEMENT_KEY" "management-key" "RADIXGROVE_METRICS_KEY" "metrics-key" "RADIXGROVE_ROOT_KEY" "root-key" "RADIXGROVE_REDIS_URL" "router-redis-url" }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef: {name: {{ $secret | quote }}, key: {{ $key }}}
{{- end }}
{{- end -}}

{{- define "radixgrove.operator-config" -}}
{{- $router := printf "%s-router" (include "radixgrove.fullname" .) -}}
{{- $pods := dict "tolerations" (.Values.pods.tolerations | default list) "node_selector" (.Values.pods.nodeSelector | default dict) "env" (include "radixgrove.proxy" . | fromYaml) -}}
{{- with .Values.pods.priorityClassName -}}{{- $_ := set $pods "priority_class" . -}}{{- end -}}
{{- with .Values.pods.runtimeClassName -}}{{- $_ := set $pods "runtime_class" . -}}{{- end -}}
{{- with .Values.pods.caBundle -}}{{- $_ := set $pods "ca_bundle" . -}}{{- end -}}
{{- range $kind := list "workers" "routers" "downloads" -}}
{{- with index $.Values.pods $kind -}}{{- $_ := set $pods $kind . -}}{{- end -}}
{{- end -}}
{{- $cache := dict "size" .Values.modelCache.size "access_mode" .Values.modelCache.accessMode "hub_endpoint" .Values.modelCache.hubEndpoint "retry_after" .Values.modelCache.retryAfter -}}
{{- with .Values.modelCache.storageClass -}}{{- $_ := set $cache "storage_class" . -}}{{- end -}}
namespace: {{ .Release.Namespace | quote }}
namespaces: {{ .Values.operator.namespaces | default list | toJson }}
images:
  worker: {{ include "radixgrove.image" (dict "root" . "name" "worker") }}
  router: {{ include "radixgrove.image" (dict "root" . "name" "router") }}
  operator: {{ include "radixgrove.image" (dict "root" . "name" "operator") }}
  pull_policy: {{ .Values.image.pullPolicy }}
  pull_secrets: {{ .Values.image.pullSecrets | default list | toJson }}
redis:
  url: {{ include "radixgrove.redis-url" . | quote }}
  prefix: {{ .Values.redis.prefix | quote }}
  users: {{ .Values.redis.users }}
  {{- if and .Values.redis.enabled (not .Values.redis.url) }}
  own: true
  labels: {{- include "radixgrove.labels" (dict "root" . "component" "redis") | nindent 4 }}
  {{- end }}
router:
  url: http://{{ $router }}.{{ .Release.Namespace }}.svc.{{ .Values.operator.clusterDomain }}{{ if ne (int .Values.router.service.port) 80 }}:{{ .Values.router.service.port }}{{ end }}/v1
  labels: {{- include "radixgrove.labels" (dict "root" . "component" "router") | nindent 4 }}
pods: {{- toYaml $pods | nindent 2 }}
model_cache: {{- toYaml $cache | nindent 2 }}
network_policies:
  enabled: {{ .Values.networkPolicy.enabled }}
  scrape_from: {{ .Values.networkPolicy.scrapeFrom | default list | toJson }}
election:
  lease: {{ include "radixgrove.fullname" . }}-operator
keys_secret: {{ include "radixgrove.keys" . | quote }}
owner_deployment: {{ include "radixgrove.fullname" . }}-operator
gpu_resource: {{ .Values.operator.gpuResource | quote }}
rdma_resource: {{ .Values.operator.rdmaResource | quote }}
cluster_domain: {{ .Values.operator.clusterDomain | quote }}
reconcilers: {{ .Values.operator.reconcilers }}
gang_timeout: {{ .Values.operator.gangTimeout }}
redis_policy: {{ printf "%s-redis-namespaces" (include "radixgrove.fullname" .) | quote }}
names_config_map: {{ printf "%s-names" (include "radixgrove.fullname" .) | quote }}
name_hold: {{ .Values.operator.nameHold }}
{{- end -}}

{{- /* RBAC rules of one scope, from the operator's own table. */ -}}
{{- define "radixgrove.rules" -}}
{{- $text := .root.Files.Get "files/rbac.yaml" -}}
{{- $text = $text | replace "'@keys-secret'" (include "radixgrove.keys" .root | quote) -}}
{{- $text = $text | replace "'@names-config-map'" (printf "%s-names" (include "radixgrove.fullname" .root) | quote) -}}
{{- $text = $text | replace "'@redis-policy'" (printf "%s-redis-namespaces" (include "radixgrove.fullname" .root) | quote) -}}
{{- $text = $text | replace "'@lease'" (printf "%s-operator" (include "radixgrove.fullname" .root) | quote) -}}
{{- $text = $text | replace "'@owner'" (printf "%s-operator" (include "radixgrove.fullname" .root) | quote) -}}
{{- index (fromYaml $text) .scope | toYaml -}}
{{- end -}}

{{- /* Seconds that streams get when a router's pod leaves. */ -}}
{{- define "radixgrove.router-drain" -}}
{{- (.Values.router.settings | default dict).drain_timeout | default 120 -}}
{{- end -}}

{{- define "radixgrove.router-config" -}}
{{- $fixed := dict "host" "::" "port" 8000 "management_host" "::" "management_port" 8001 "processes" .Values.router.processes "policy" .Values.router.policy "model_table" "shared" "redis_prefix" .Values.redis.prefix -}}
{{- if .Values.router.auth.keysSecret -}}
{{- $_ := set $fixed "api_keys_file" "/etc/radixgrove-keys/api-keys" -}}
{{- end -}}
{{- $defaults := dict "log_json" true "drain_timeout" (include "radixgrove.router-drain" . | float64) -}}
{{- mergeOverwrite $defaults (.Values.router.settings | default dict) $fixed | toYaml -}}
{{- end -}}
