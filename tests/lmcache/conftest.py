"""The real LMCache on a CPU: its storage manager, controllers, factory of adapters, and benchmark.

Needs LMCache, which ``make test-lmcache`` installs with its dependencies; without LMCache no test here is collected.
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["test_*.py"]
