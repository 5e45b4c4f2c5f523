"""The program ``carryover``: Ctrl-C at any moment, imports included, ends it with 130 and no trace."""

import signal
import sys

from . import leave


def run():
    """Run the command line of this process; always ends in SystemExit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the caller has it ignored
        signal.signal(signal.SIGINT, leave)
    code = 130
    try:
        from .main import main

        main()
    except KeyboardInterrupt:
        pass
    except SystemExit as ended:
        code = ended.code
    # Python gives the signal its deadly default back while it shuts down, a second with torch: what is done keeps its exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exec("")  # under -m CPython ends by that signal, whatever the code, where the last string under exec was interrupted: this was not
    sys.exit(code)


if __name__ == "__main__":
    run()
