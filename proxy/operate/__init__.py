"""Commands that change a running proxy: `drain_cli` takes one backend out of use, and back.

May import `command` and `diagnose.admin_client`.
"""
