"""What `ember --help` says: short, with examples. Hydra's own flags are under --hydra-help."""

HELP = """\
usage: ember [FLAGS] KEY=VALUE ...        run a job; the same as python -m ember.run
"""
