{{- define "ckptd.job" -}}
{{- $job := .Values.job | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$" $job) }}{{ fail (printf "the job's name %q is no name of hosts of at most 42 characters: set job=NAME" $job) }}{{ end -}}
{{- if has $job (list "on" "off" "yes" "no" "y" "n" "true" "false" "null") }}{{ fail (printf "YAML reads the job's name %q as another value: set job=NAME" $job) }}{{ end -}}
{{ $job }}
{{- end }}

{{- /* The controller's name in the job's own subdomain. */ -}}
{{- define "ckptd.host" -}}
{{- $job := include "ckptd.job" . -}}
{{- if eq .Values.pods "controller" }}controller.{{ $job }}{{ else }}{{ $job }}-controller-0-0.{{ $job }}{{ end }}
{{- end }}

{{- define "ckptd.log" -}}
{{- if .Values.log }}{{ .Values.log }}
{{- else if .Values.claim }}{{ .Values.mount }}/{{ include "ckptd.job" . }}/membership
{{- else }}{{ fail "log: without a claim the controller's log is on an object store: set log=s3://BUCKET/PREFIX" }}
{{- end }}
{{- end }}

{{- define "ckptd.user" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ckptd.least" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "ckptd.secret" -}}
- {name: CKPTD_RUN_DIR, value: /run/ckptd/sockets}
- name: CKPTD_SECRET
  valueFrom: {secretKeyRef: {name: {{ .Values.secret.name }}, key: {{ .Values.secret.key }}}}
{{- end }}

{{- define "ckptd.keys" }}
{{- with .Values.storeKeys }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- /* What runs the pods of the job: their own processes, and no code of trainers. */ -}}
{{- define "ckptd.aside" -}}
serviceAccountName: {{ include "ckptd.job" . }}
automountServiceAccountToken: true
{{ include "ckptd.user" . }}
# Not on a machine that trains, whose loss would take both.
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector: {matchLabels: {ckptd.io/role: trainer}}
volumes:
  - name: run
    emptyDir: {}
  - name: tmp
    emptyDir: {}
  {{- with .Values.claim }}
  - name: checkpoints
    persistentVolumeClaim: {claimName: {{ . }}}
  {{- end }}
{{- end }}

{{- define "ckptd.mounts" -}}
volumeMounts:
  - {name: run, mountPath: /run/ckptd}
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.claim }}
  - {name: checkpoints, mountPath: {{ .Values.mount }}}
  {{- end }}
{{- end }}

{{- define "ckptd.controller" -}}
image: {{ .Values.image }}
command:
  - ckptd
  - controller
  - --job={{ include "ckptd.job" . }}
  - --nodes={{ .Values.nodes.min }}:{{ .Values.nodes.max }}
  - --slots={{ .Values.ranksPerNode }}
  {{- with .Values.layout }}
  - --layout={{ . }}
  {{- end }}
  {{- with .Values.microbatches }}
  - --microbatches={{ . }}
  {{- end }}
  # On what outlives this pod: any store does, s3:// too.
  - --log={{ include "ckptd.log" . }}
  - --bind=0.0.0.0
  - --port=29400
  - --host={{ include "ckptd.host" . }}
env:
  {{- include "ckptd.secret" . | nindent 2 }}
{{- include "ckptd.keys" . }}
{{ include "ckptd.mounts" . }}
ports: [{name: controller, containerPort: 29400}]
# One that hangs keeps its connections, and would have the ranks killed by their lease of 120 s.
livenessProbe:
  exec: {command: [ckptd, ctl, status, --job={{ include "ckptd.job" . }}, "--controller=127.0.0.1:29400"]}
  initialDelaySeconds: 30
  periodSeconds: 20
  timeoutSeconds: 15
  failureThreshold: 2
  terminationGracePeriodSeconds: 5
resources: {{- toYaml .Values.controller.resources | nindent 2 }}
{{ include "ckptd.least" . }}
{{- end }}

{{- /* Finds ranks that hang, are slow or differ, and has the controller act on it. */ -}}
{{- define "ckptd.daemon" -}}
image: {{ .Values.image }}
command:
  - ckptd
  - serve
  - --job={{ include "ckptd.job" . }}
  - --controller=127.0.0.1:29400
  # At the pod's own address: that is what the pods of the job are told.
  - --bind=$(CKPTD_BIND)
  - --port=8400
env:
  {{- include "ckptd.secret" . | nindent 2 }}
  - name: CKPTD_BIND
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- include "ckptd.keys" . }}
{{ include "ckptd.mounts" . }}
ports: [{name: metrics, containerPort: 8400}]
resources: {{- toYaml .Values.daemon.resources | nindent 2 }}
{{ include "ckptd.least" . }}
{{- end }}

{{- define "ckptd.launchers" -}}
image: {{ .Values.image }}
command:
  - ckptd
  - kubernetes
  {{- if eq .Values.pods "controller" }}
  - --template={{ include "ckptd.job" . }}
  - --nodes={{ .Values.nodes.max }}
  {{- else }}
  - --selector=jobset.sigs.k8s.io/jobset-name={{ include "ckptd.job" . }},jobset.sigs.k8s.io/replicatedjob-name=node
  {{- end }}
  - --controller=127.0.0.1:29400
  {{- if eq .Values.pods "controller" }}
  - --
  {{- include "ckptd.words" . | nindent 2 }}
  {{- end }}
env:
  - {name: CKPTD_JOB, value: {{ include "ckptd.job" . }}}
  {{- include "ckptd.secret" . | nindent 2 }}
{{- include "ckptd.keys" . }}
{{ include "ckptd.mounts" . }}
resources: {{- toYaml .Values.launchers.resources | nindent 2 }}
{{ include "ckptd.least" . }}
{{- end }}

{{- /* What follows `ckptd run`. */ -}}
{{- define "ckptd.words" -}}
{{- if gt (int .Values.nodes.min) (int .Values.nodes.max) }}{{ fail "nodes: min is above max" }}{{ end -}}
- --job={{ include "ckptd.job" . }}
- --rdzv-endpoint={{ include "ckptd.host" . }}:29400
- --nnodes={{ .Values.nodes.min }}:{{ .Values.nodes.max }}
- --nproc-per-node={{ .Values.ranksPerNode }}
{{- with .Values.layout }}
- --layout={{ . }}
{{- end }}
{{- range .Values.script }}
{{- if and (not $.Values.claim) (contains (printf "%s/" $.Values.mount) .) }}{{ fail (printf "script: %q lies on a volume, and claim is empty: set script too" .) }}{{ end }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* A trainer's pod, without its containers. */ -}}
{{- define "ckptd.pod" -}}
# Code of trainers gets no token.
automountServiceAccountToken: false
# After TERM ckptd run has so long to save and to leave.
terminationGracePeriodSeconds: {{ .Values.trainer.graceSeconds }}
{{- if and .Values.rdma.enabled .Values.rdma.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{ include "ckptd.user" . }}
{{- with .Values.trainer.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
# Near each other, where the cluster names zones, and on machines of their own, where there are enough.
affinity:
  podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 50
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector: {matchLabels: {ckptd.io/network: {{ include "ckptd.job" . }}}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {ckptd.io/network: {{ include "ckptd.job" . }}, ckptd.io/role: trainer}}
# A machine that does not answer any more: its pod's deletion begins after this and not after 300 s.
# The job does not wait for it; what is gained is a pod elsewhere.
tolerations:
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 20}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 20}
{{- with .Values.trainer.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: run
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.trainer.sharedMemory }}}
  {{- with .Values.claim }}
  - name: checkpoints
    persistentVolumeClaim: {claimName: {{ . }}}
  {{- end }}
{{- end }}

{{- /* A trainer's container, without its name and command. */ -}}
{{- define "ckptd.trainer" -}}
image: {{ .Values.image }}
workingDir: {{ .Values.workingDir }}
env:
  {{- include "ckptd.secret" . | nindent 2 }}
  # Snapshots of a peer lie on another machine wherever that can be.
  - name: CKPTD_DOMAIN
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  # Ranks are placed by it. Kubernetes copies the label from the machine (1.35); empty without.
  - name: CKPTD_TOPOLOGY
    valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
  - name: CKPTD_BIND
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- with .Values.trainer.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- include "ckptd.keys" . }}
volumeMounts:
  - {name: run, mountPath: /run/ckptd}
  - {name: shm, mountPath: /dev/shm}
  {{- if .Values.claim }}
  - {name: checkpoints, mountPath: {{ .Values.mount }}}
  {{- end }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "ckptd.resources" -}}
{{- $all := deepCopy .Values.trainer.resources -}}
{{- with .Values.rdma -}}
{{- if .enabled -}}
{{- $all = mergeOverwrite $all (dict "limits" (dict .resource .count)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.trainer.resourceClaims -}}
{{- $names := list -}}
{{- range . -}}{{- $names = append $names (dict "name" .name) -}}{{- end -}}
{{- $all = set $all "claims" $names -}}
{{- end -}}
{{ toYaml $all }}
{{- end }}
