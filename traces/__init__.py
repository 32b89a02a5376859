"""Requests as records: read, edit, make and write traces. This package imports no other of Forebay.

On top are the modules that its rooms share: `errors` and `schema` (public paths into `ground`),
`rows` (a row of another tool's table), `text` (prompts from block ids), `tokens` (counters).

The rooms, each of which may import those above it in this list:

- `ground`: what all four packages share. The proxy imports nothing else of this package.
- `reading`: files as streams of rows and requests.
- `formats`: the trace formats, each a line of a table and a function.
- `edit`: changes to a trace on its way through a pipe, descriptions and exports.
- `synth`: traces that are made, or fitted to others.
- `cli`: the command `forebay traces`.
"""
