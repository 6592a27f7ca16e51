"""MetaWorld (MT50, ML45 train and test, or one task): a Sawyer arm at a table, one camera, one sentence per task."""

from rlinf.simulators.metaworld.expert import Expert as Expert
from rlinf.simulators.metaworld.scene import Scene as Scene
from rlinf.simulators.metaworld.scene import loaded_tasks as loaded_tasks
from rlinf.simulators.metaworld.suite import Options as Options
from rlinf.simulators.metaworld.suite import protocol as protocol
from rlinf.simulators.metaworld.suite import spec as spec
