"""Find the highest load at which a server meets its targets, and prove it: `forebay search`."""
