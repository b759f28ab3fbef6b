{{- define "idemconsumer.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "idemconsumer.selector" -}}
app.kubernetes.io/name: idemconsumer
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "idemconsumer.labels" -}}
{{ include "idemconsumer.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "idemconsumer.image" -}}
{{- $repository := required "image.repository is required" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ required "image.tag or image.digest is required" .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* What the pods of the workers and the one of the migration have in common. */}}
{{- define "idemconsumer.pod" -}}
# The namespace may have a service whose variables look like settings.
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  # A Secret's files belong to root and to this group, so its keys need not be readable by all, which libpq refuses.
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: tmp
    emptyDir: {}
  {{- with .Values.volumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "idemconsumer.container" -}}
image: {{ include "idemconsumer.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
# The last line of the log says why it gave up.
terminationMessagePolicy: FallbackToLogsOnError
resources: {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- with .Values.volumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* With the root, the Secret, and the variables of `extraEnv`, which come before those of a Secret. */}}
{{- define "idemconsumer.variables" -}}
{{- $values := .root.Values -}}
env:
  {{- /* As JSON, since `quote` makes 4.194304e+06 of a number that large. */}}
  {{- range $name, $value := $values.settings }}
  - name: IDEMCONSUMER_{{ upper $name }}
    value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
  {{- end }}
  - name: IDEMCONSUMER_WORKERS
    value: {{ $values.workers | quote }}
  - name: IDEMCONSUMER_DRAIN_TIMEOUT
    value: {{ $values.drainTimeout | quote }}
  {{- with .extra }}{{ toYaml . | nindent 2 }}{{ end }}
{{- $from := $values.envFrom }}
{{- with .secret }}{{ $from = append $from (dict "secretRef" (dict "name" .)) }}{{ end }}
envFrom: {{- toYaml $from | nindent 2 }}
{{- end -}}
