"""Which samples share a pack, and which pack is trained when and where; ``packtool.plan(...)`` is the library's."""

import sys

from packtool import CallableRoom

sys.modules[__name__].__class__ = CallableRoom
