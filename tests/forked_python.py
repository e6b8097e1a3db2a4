"""In place of python: the program runs in a fork of a process that has done its imports.

    forked_python.py ADDRESS … -c PROGRAM

`tests/preloading.py` says why. This file imports next to nothing, and ends when the fork does.
"""

import socket
import sys

with socket.socket(socket.AF_UNIX) as link:
    link.connect(sys.argv[1])
    socket.send_fds(link, [sys.argv[-1].encode()], [0, 1, 2])
    link.recv(1)  # the fork holds the other end
