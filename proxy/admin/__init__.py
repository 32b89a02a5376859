"""The admin port: answers of a running proxy to operators and dashboards.

In reading order: port (paths and their answers), status (the JSON of /status), request_list (the
JSON of /requests), preview (the JSON of /preview), backend_facts (answers of each backend about
itself, for `forebay doctor`), watch (the checks of `forebay doctor`, twice a minute).

May import every room but share, where a proxy with workers combines these answers.
"""
