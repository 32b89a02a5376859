"""Read files as streams: bytes, then rows, then requests.

In reading order: `containers` opens and unpacks files and cuts them into rows, `reader` turns rows
into requests and reports bad ones by their line, `jsonl` is Forebay's own format. The room imports
only the ground of `forebay.traces`.
"""
