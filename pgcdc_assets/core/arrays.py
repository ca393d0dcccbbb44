"""Names for the arrays that a run of messages is worked on with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Octets = NDArray[np.uint8]
