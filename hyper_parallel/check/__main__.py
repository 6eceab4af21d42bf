import sys

from hyper_parallel.check.command import main

sys.exit(main())
