"""The command `forebay traces`.

In reading order: `main` has the Typer app and the short commands, `import_` reads and exports,
`edit` changes traces, `synth` makes them, `output` writes the trace and the line of text at the
end. The room may import all of `forebay.traces`.
"""
