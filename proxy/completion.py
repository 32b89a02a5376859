"""`forebay completion SHELL`: print a script that completes commands and options.

The script asks `forebay __complete WORDS` at each key press, so that it never has to be renewed.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.errors import InputError

EXAMPLE = """Print a completion script for bash, zsh or fish.

Example:

  forebay completion bash >> ~/.bash_completion

  forebay completion zsh > ~/.zfunc/_forebay

  forebay completion fish > ~/.config/fish/completions/forebay.fish
"""
SCRIPTS = {
    "bash": """_forebay() {
  local IFS=$'\\n'
  COMPREPLY=($(forebay __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o bashdefault -o default -F _forebay forebay
""",
    "zsh": """#compdef forebay
_forebay() {
  local -a found
  found=(${(f)"$(forebay __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _forebay forebay
""",
    "fish": "complete -c forebay -a "
    "'(forebay __complete (commandline -opc)[2..] (commandline -ct))'\n",
}

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish")]) -> None:
    if shell not in SCRIPTS:
        raise InputError(f"no completion for {shell!r}; one of: {', '.join(SCRIPTS)}")
    print(SCRIPTS[shell], end="")


def candidates(words: Sequence[str], commands: dict[str, tuple[str, str]]) -> Iterable[str]:
    """Return the candidates for the last word, or none in place of a file name.

    Args:
        words: the words after `forebay`.
        commands: `cli.COMMANDS`.
    """
    *before, prefix = words or [""]
    options: list[str] = [*commands, "--help", "--version"]
    if before:
        if before[0] not in commands:
            return []
        module, attribute = commands[before[0]][0].split(":")
        command = typer.main.get_command(getattr(import_module(module), attribute))
        for word in before[1:]:
            command = getattr(command, "commands", {}).get(word, command)
        options = [*getattr(command, "commands", {}), "--help", "--quiet"]
        for param in command.params:
            if param.param_type_name == "option" and not getattr(param, "hidden", False):
                options += [*param.opts, *param.secondary_opts]
    options = [option for option in dict.fromkeys(options) if option.startswith(prefix)]
    return (
        options
        if prefix.startswith("-")
        else [option for option in options if not option.startswith("-")]
    )
