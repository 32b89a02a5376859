"""Commands that ask a running proxy.

In reading order: admin_client (asks the admin port), explain_cli (`forebay explain`), receipt_text
(a decision in words), doctor_cli (`forebay doctor`), checks (one function for each), doctor
(findings, the causes of rejections, and the checks of caches), scene (the data of all checks),
config_file (a file, and whether it is in force), top_cli (`forebay top`), frame (the numbers of a
screen).

May import api, backends, config, core, http1, security and telemetry. Of the modules that serve
requests only the admin port imports it, for receipt_text and the checks.
"""
