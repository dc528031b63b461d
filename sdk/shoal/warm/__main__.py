"""Main program of the warm process: `python -u .../shoal/warm/__main__.py SOCKET LAUNCHER`. In
forked workers, the script runs below this module's frame."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this module's directory; workers have their script's directory there

if __name__ == "__main__":
    from shoal.warm.forking import serve

    serve(int(sys.argv[1]), launcher=int(sys.argv[2])).run()  # returns in forked children only
