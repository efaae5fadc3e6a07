{{- define "mdp.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
# More than draining takes.
terminationGracePeriodSeconds: 30
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . }}}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "mdp.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The first container of each pod: image, and the part that it pulls. */ -}}
{{- define "mdp.pull" -}}
- name: bundle
  image: {{ .image | quote }}
  command: [mdp]
  args:
    - bundle
    - pull
    - {{ .root.Values.bundle.reference | quote }}
    - {{ .part }}
    - --out=/srv/bundle
    {{- if .root.Values.bundle.key }}
    - --bundle-key=/run/release/release.public
    {{- end }}
  env:
    - {name: REGISTRY_AUTH_FILE, value: /run/registry/auth.json}
    {{- if .root.Values.bundle.authority }}
    - {name: SSL_CERT_FILE, value: /run/authority/ca.crt}
    {{- end }}
  securityContext:
    {{- include "mdp.confined" . | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 256Mi}
  volumeMounts:
    - {name: srv, mountPath: /srv}
    - {name: login, mountPath: /run/registry, readOnly: true}
    {{- if .root.Values.bundle.key }}
    - {name: release, mountPath: /run/release, readOnly: true}
    {{- end }}
    {{- if .root.Values.bundle.authority }}
    - {name: authority, mountPath: /run/authority, readOnly: true}
    {{- end }}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "mdp.volumes" -}}
- name: srv
  emptyDir: {sizeLimit: 1Gi}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 256Mi}
# A login for the registry, if it asks for one.
- name: login
  secret:
    secretName: {{ .Values.bundle.login | default "registry" }}
    optional: true
    defaultMode: 0440
    items: [{key: .dockerconfigjson, path: auth.json}]
{{- if .Values.bundle.key }}
- name: release
  secret: {secretName: {{ .Values.bundle.key }}, defaultMode: 0440}
{{- end }}
{{- if .Values.bundle.authority }}
- name: authority
  secret: {secretName: {{ .Values.bundle.authority }}, defaultMode: 0440}
{{- end }}
{{- end }}
