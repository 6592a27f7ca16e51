"""Published numbers of the put-on-plate world, for both back ends: robot, table, camera and lights. No imports."""

from __future__ import annotations

CONTROL_MODE = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
SIM_FREQ, CONTROL_FREQ = 500, 5  # Hz

# The WidowX-250S; its base looks along -x of the world
BASE_POSITION, BASE_QUATERNION = (0.147, 0.028, 0.870), (0.0, 0.0, 0.0, 1.0)
STIFFNESS = (1169.7891719504198, 730.0, 808.4601346394447, 1229.1299089624076, 1272.2760456418862, 1056.3326605132252)
DAMPING = (330.0, 180.0, 152.12036565582588, 309.6215302722146, 201.04998711007383, 269.51458932695414)
FORCE_LIMIT = (200.0, 200.0, 100.0, 100.0, 100.0, 100.0)
FINGER_STIFFNESS, FINGER_DAMPING, FINGER_FORCE = 1000.0, 200.0, 60.0
FINGER_CLOSED, FINGER_OPEN = 0.014, 0.038  # m, a millimetre past the stops, so that a closed hand presses
GRIPPER_LINK, FINGER_LINKS = "ee_gripper_link", ("left_finger_link", "right_finger_link")
ROBOT_SPECULAR, ROBOT_ROUGHNESS = 0.9, 0.3  # of its metal, as drawn

TABLE_POSITION, TABLE_QUATERNION = (2.0634, 2.8313, 0.0), (0.707, 0.707, 0.0, 0.0)
FRICTION, ROBOT_FRICTION = 1.0, 0.3  # of objects and plates; of robot and table

NATIVE_SIZE = (480, 640)  # height, width of the picture
FOCAL, CENTRE = 623.588, (319.501, 239.545)  # pixels of the native picture
CAMERA = (0.0, -0.16, 0.36), (0.8992917, -0.09263245, 0.35892478, 0.23209205)  # in the frame of the robot's base
LIGHTS = (((0, 0, -1), 2.2), ((-1, -0.5, -1), 0.7), ((1, 1, -1), 0.7))  # direction, strength
AMBIENT = 0.3


def lens(size: tuple[int, int]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Focal lengths and centre, x and y each, at a height and width: the field of view is always the same."""
    down, across = size[0] / NATIVE_SIZE[0], size[1] / NATIVE_SIZE[1]
    return (FOCAL * across, FOCAL * down), (CENTRE[0] * across, CENTRE[1] * down)
