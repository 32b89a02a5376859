"""Commands that ask a running proxy.

In reading order: admin_client (asks the admin port), explain_cli (`forebay explain`), receipt_text
(a decision in words), spoken_times (times for people), doctor_cli (`forebay doctor`), checks (one
function for each), doctor (what a check yields, the causes of rejections, and the checks of
caches), scene (what they look at), config_file (a file, and whether it is in force), top_cli
(`forebay top`), frame (what it shows).

May import api, backends, config, core, http1 and telemetry; nothing that serves requests imports it
but the admin port, for receipt_text.
"""
