"""The toy: move a white dot onto the dot that the instruction names. Numpy only, a few microseconds a step.

The smallest complete simulator, and the one to copy for a simulator of your own.
"""

from rlinf.simulators.toy.expert import Expert as Expert
from rlinf.simulators.toy.scene import Batch as Batch
from rlinf.simulators.toy.scene import Scene as Scene
from rlinf.simulators.toy.suite import Options as Options
from rlinf.simulators.toy.suite import protocol as protocol
from rlinf.simulators.toy.suite import spec as spec
