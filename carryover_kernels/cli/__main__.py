"""The program ``carryover``: Ctrl-C at any moment, imports included, ends it with 130 and no trace."""

import signal
import sys


def run():
    """Run the command line of this process; always ends in SystemExit."""
    code = 130
    try:
        from .main import main

        main()
    except KeyboardInterrupt:  # during the imports
        pass
    except SystemExit as ended:
        code = ended.code
    # Python gives the signal its deadly default back while it shuts down, a second with torch: what is done keeps its exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    run()
