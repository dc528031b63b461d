"""Program of the warm process: `python -u .../shoal/warm/__main__.py SOCKET LAUNCHER`. Workers run
below the frame of this module."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this folder; a worker has its script's folder there

if __name__ == "__main__":
    from shoal.warm.forking import serve

    serve(int(sys.argv[1]), launcher=int(sys.argv[2])).run()  # returns in forked children only
