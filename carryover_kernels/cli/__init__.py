"""The ``carryover`` command. Nothing heavy is imported before a command runs."""

import os
import signal


def leave(*_):
    """SIGINT while imports run: nothing is under way, and an exception inside PyTorch's C++ start-up would abort the process."""
    os._exit(130)


def listen():
    """Imports are over: from here on Ctrl-C is a KeyboardInterrupt, so that what is done can be kept."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
