"""RoboTwin 2.0: 46 tasks for two arms at a table, in the user's checkout and an interpreter of its own."""

from rlinf.simulators.robotwin.assets import own_interpreter as own_interpreter
from rlinf.simulators.robotwin.expert import Expert as Expert
from rlinf.simulators.robotwin.provenance import protocol as protocol
from rlinf.simulators.robotwin.scene import Scene as Scene
from rlinf.simulators.robotwin.suite import Options as Options
from rlinf.simulators.robotwin.suite import check_setup as check_setup
from rlinf.simulators.robotwin.suite import seed_candidates as seed_candidates
from rlinf.simulators.robotwin.suite import seed_document as seed_document
from rlinf.simulators.robotwin.suite import smallest_task as smallest_task
from rlinf.simulators.robotwin.suite import spec as spec
