{{- define "forebay.name" -}}
{{- if contains "forebay" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-forebay" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "forebay.selector" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "forebay.metadata" -}}
name: {{ include "forebay.name" . }}
labels:
  {{- include "forebay.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Several proxies that do not share would each fill the GPUs as if they were alone. */}}
{{- define "forebay.check" -}}
{{- $several := or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled .Values.keda.enabled -}}
{{- if and $several (not .Values.share.url) (not .Values.secret) -}}
{{- fail "several proxies must share: set share.url to redis://HOST:6379/0, or secret to a Secret with FOREBAY_SHARE" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled .Values.keda.enabled -}}
{{- fail "autoscaling.enabled and keda.enabled: choose one" -}}
{{- end -}}
{{- end -}}
