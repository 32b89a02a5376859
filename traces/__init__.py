"""Requests as records: read, edit, make and write traces. This package imports no other of Forebay.

On top are the modules that all rooms share: `schema` (the record of a request), `errors` (bad
input), `rows` (a row of another tool's table), `text` (prompts from block ids), `tokens`
(counters), `tokenizer_file` (a model's own vocabulary), `buckets` (length buckets), `decoders`
(gzip and zstd) and `whole_file` (files that appear when they are complete).

The rooms, each of which may import those above it in this list:

- `command_line`: help, options and messages of the commands of all four packages.
- `reading`: files as streams of rows and requests.
- `formats`: the trace formats, each a line of a table and a function.
- `edit`: changes to a trace on its way through a pipe, descriptions and exports.
- `synth`: traces that are made, or fitted to others.
- `cli`: the command `forebay traces`.
"""
