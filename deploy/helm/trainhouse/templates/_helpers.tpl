{{- define "trainhouse.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "trainhouse.selector" -}}
app.kubernetes.io/name: trainhouse
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "trainhouse.labels" -}}
{{ include "trainhouse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "trainhouse.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "trainhouse.claim" -}}
{{ .Values.state.existingClaim | default (printf "%s-state" (include "trainhouse.name" .)) }}
{{- end }}

{{- define "trainhouse.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "trainhouse.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "trainhouse.environmentFrom" -}}
{{- with .Values.secrets.environment }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- define "trainhouse.database" -}}
{{- if .Values.postgresql.enabled }}
- name: POSTGRES_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.postgresql.secret }}, key: password}}
- name: TRAINHOUSE_DATABASE_URL
  value: postgresql+psycopg://trainhouse:$(POSTGRES_PASSWORD)@{{ include "trainhouse.name" . }}-postgresql/trainhouse
{{- else }}
- name: TRAINHOUSE_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ required "name a secret with the database's url in secrets.database, or set postgresql.enabled" .Values.secrets.database }}
      key: url
{{- end }}
{{- end }}
