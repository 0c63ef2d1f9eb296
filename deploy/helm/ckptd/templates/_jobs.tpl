{{- /* The pod beside the trainers, in a Job: its sidecars start anew by themselves (Kubernetes 1.29). */ -}}
{{- define "ckptd.asidejob" -}}
completions: 1
parallelism: 1
backoffLimit: 100
podFailurePolicy:
  rules:
    # Requeue, no nodes, no progress: this Job fails at once, and with it the JobSet.
    - action: FailJob
      onExitCodes: {containerName: launchers, operator: In, values: [75, 76, 77]}
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
template:
  metadata:
    labels:
      app: ckptd-controller
      ckptd.io/network: {{ include "ckptd.job" . }}
  spec:
    restartPolicy: Never
    {{- include "ckptd.aside" . | nindent 4 }}
    initContainers:
      - name: controller
        restartPolicy: Always
        {{- include "ckptd.controller" . | nindent 8 }}
      # Finds ranks that hang, are slow or differ, and has the controller act on it.
      - name: daemon
        restartPolicy: Always
        {{- include "ckptd.daemon" . | nindent 8 }}
    containers:
      - name: launchers
        {{- include "ckptd.launchers" . | nindent 8 }}
{{- end }}

{{- define "ckptd.jobsetspec" -}}
network:
  # {{ include "ckptd.host" . }}, {{ include "ckptd.job" . }}-node-0-0.{{ include "ckptd.job" . }}, ...
  enableDNSHostnames: true
  publishNotReadyAddresses: true
  {{- if eq .Values.pods "jobset" }}
  subdomain: {{ include "ckptd.job" . }}
  {{- end }}
# The job has ended when its controller says so: 0 only then.
successPolicy:
  operator: All
  targetReplicatedJobs: [controller]
failurePolicy:
  # What ckptd itself gives up begins anew, on whatever machines there are then, from the last
  # checkpoint. (A rule with onJobFailureMessagePatterns can tell exit code 75 from the others.)
  maxRestarts: 3
{{- end }}
