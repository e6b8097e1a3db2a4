"""Makes the builders of this folder importable, which is no package: its name is a module's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
