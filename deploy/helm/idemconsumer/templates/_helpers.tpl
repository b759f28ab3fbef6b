{{- define "idemconsumer.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "idemconsumer.selector" -}}
app.kubernetes.io/name: idemconsumer
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{- define "idemconsumer.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "idemconsumer.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The namespace may have a service whose variables look like settings: enableServiceLinks is false everywhere. */}}
{{- define "idemconsumer.environment" -}}
{{- range $name, $value := .Values.settings }}
- name: IDEMCONSUMER_{{ upper $name }}
  value: {{ $value | quote }}
{{- end }}
- name: IDEMCONSUMER_WORKERS
  value: {{ .Values.workers | quote }}
- name: IDEMCONSUMER_DRAIN_TIMEOUT
  value: {{ .Values.drainTimeout | quote }}
{{- end -}}
