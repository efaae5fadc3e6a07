"""Views of solid items on a belt, rendered by VTK without a screen."""

import math
from collections.abc import Iterator

import numpy as np
import vtk
from numpy.typing import NDArray
from vtk.util.numpy_support import numpy_to_vtk, numpy_to_vtkIdTypeArray, vtk_to_numpy

from benchmarks.scenes.solid_draws import FINISHES, Light, Pose, Shot, SolidScene, texture
from benchmarks.scenes.solid_items import Item, Mesh

Pixels = NDArray[np.uint8]

#: Half of the belt's length and width, in radii.
_BELT = 6.0
#: The viewing angle in degrees, and the distance of lamps in radii.
_ANGLE, _FAR = 32.0, 8.0
#: Least height over the belt of what lies on it.
_GAP = 0.004


class ItemRenderer:
    """Renderer of one item on a belt, for its cameras."""

    def __init__(self, side: int, item: Item, radius: float, like: Item | None = None) -> None:
        """Views have `side` pixels; `radius` is what is shown as 1.

        The item is put where the item `like` has its middle: by default its own.
        """
        self._window = vtk.vtkRenderWindow()
        self._window.SetOffScreenRendering(1)
        self._window.SetMultiSamples(4)
        self._window.SetSize(side, side)
        self._renderer = vtk.vtkRenderer()
        self._renderer.SetAutomaticLightCreation(0)
        self._window.AddRenderer(self._renderer)
        low, high = (like or item).bounds
        self._centre, self._scale = (low + high) / 2, 1 / radius
        self._actors = [_actor(mesh) for mesh in item.meshes]
        self._colourless = [mesh.colour is None for mesh in item.meshes]
        self._shadows = [_shadow(actor) for actor in self._actors]
        self._image = vtk.vtkImageData()
        self._belt = _belt(self._image)
        for actor in (*self._actors, *self._shadows, self._belt):
            self._renderer.AddActor(actor)
        self._grab = vtk.vtkWindowToImageFilter()
        self._grab.SetInput(self._window)
        self._grab.ReadFrontBufferOff()

    def close(self) -> None:
        """Free the window."""
        self._window.Finalize()

    def views(self, scene: SolidScene) -> Iterator[tuple[Shot, Pixels]]:
        """The rendered view `[S, S, 3]` of each camera."""
        self._place(scene.pose)
        self._paint(scene)
        self._light(scene.lights)
        for shot in scene.shots:
            yield shot, self._view(shot)

    def _place(self, pose: Pose) -> None:
        moved = vtk.vtkTransform()
        moved.PostMultiply()
        moved.Translate(*(-self._centre))
        moved.Scale(self._scale, self._scale, self._scale)
        turns = (None, ("X", 180), ("X", 90), ("X", -90), ("Y", -90), ("Y", 90))
        if (turn := turns[pose.face]) is not None:
            (moved.RotateX if turn[0] == "X" else moved.RotateY)(turn[1])
        moved.RotateX(pose.tilt[0])
        moved.RotateY(pose.tilt[1])
        moved.RotateZ(pose.turn)
        moved.Translate(*pose.shift, 0)
        for actor in self._actors:
            actor.SetUserTransform(moved)
        low = min(actor.GetBounds()[4] for actor in self._actors)
        # The belt is z = 0.
        moved.Translate(0, 0, _GAP - low)
        self._moved = moved

    def _paint(self, scene: SolidScene) -> None:
        pixels = texture(scene.belt)
        self._image.SetDimensions(pixels.shape[1], pixels.shape[0], 1)
        values = numpy_to_vtk(np.ascontiguousarray(pixels.reshape(-1, 3)), deep=1)
        self._image.GetPointData().SetScalars(values)
        self._image.Modified()
        self._renderer.SetBackground(*scene.wall)
        colour, shine = FINISHES[scene.finish]
        for actor, colourless in zip(self._actors, self._colourless, strict=True):
            if colourless:
                actor.GetProperty().SetColor(*colour)
                actor.GetProperty().SetSpecularPower(shine)
        for shadow in self._shadows:
            shadow.GetProperty().SetColor(*(0.4 * level for level in scene.belt.colour))

    def _light(self, lights: tuple[Light, ...]) -> None:
        self._renderer.RemoveAllLights()
        for light in lights:
            lamp = vtk.vtkLight()
            lamp.SetLightTypeToSceneLight()
            lamp.SetPosition(
                *(_FAR * value for value in _direction(light.elevation, light.azimuth))
            )
            lamp.SetFocalPoint(0, 0, 0)
            lamp.SetIntensity(light.intensity)
            lamp.SetColor(*light.colour)
            self._renderer.AddLight(lamp)
        brightest = max(lights, key=lambda light: light.intensity)
        x, y, z = _direction(brightest.elevation, brightest.azimuth)
        flat = vtk.vtkMatrix4x4()
        flat.DeepCopy((1, 0, -x / z, 0, 0, 1, -y / z, 0, 0, 0, 0, _GAP / 2, 0, 0, 0, 1))
        cast = vtk.vtkTransform()
        cast.SetMatrix(flat)
        cast.Concatenate(self._moved)
        for shadow in self._shadows:
            shadow.SetUserTransform(cast)

    def _view(self, shot: Shot) -> Pixels:
        camera = self._renderer.GetActiveCamera()
        camera.SetViewAngle(_ANGLE)
        camera.SetFocalPoint(shot.aim[0], shot.aim[1], 0.3 + shot.aim[2])
        seen_from = _direction(shot.elevation, shot.azimuth)
        camera.SetPosition(*(shot.distance * value for value in seen_from))
        camera.SetViewUp(*((1, 0, 0) if shot.elevation > 75 else (0, 0, 1)))
        self._renderer.ResetCameraClippingRange()
        self._window.Render()
        self._grab.Modified()
        self._grab.Update()
        shown = self._grab.GetOutput()
        width, height, _ = shown.GetDimensions()
        rows = vtk_to_numpy(shown.GetPointData().GetScalars()).reshape(height, width, -1)
        return np.ascontiguousarray(rows[::-1, :, :3])


def _direction(elevation: float, azimuth: float) -> tuple[float, float, float]:
    """Unit vector to where something is seen, of angles in degrees."""
    up, round_ = math.radians(elevation), math.radians(azimuth)
    return math.cos(up) * math.cos(round_), math.cos(up) * math.sin(round_), math.sin(up)


def _actor(mesh: Mesh) -> vtk.vtkActor:
    points, cells, surface = vtk.vtkPoints(), vtk.vtkCellArray(), vtk.vtkPolyData()
    points.SetData(numpy_to_vtk(mesh.points, deep=1))
    count = len(mesh.triangles)
    rows = np.concatenate([np.full((count, 1), 3), mesh.triangles], axis=1).ravel()
    cells.SetCells(count, numpy_to_vtkIdTypeArray(rows, deep=1))
    surface.SetPoints(points)
    surface.SetPolys(cells)
    normals = vtk.vtkPolyDataNormals()
    normals.SetInputData(surface)
    normals.SetFeatureAngle(35)
    normals.SplittingOn()
    mapper = vtk.vtkPolyDataMapper()
    mapper.SetInputConnection(normals.GetOutputPort())
    actor = vtk.vtkActor()
    actor.SetMapper(mapper)
    look = actor.GetProperty()
    look.SetColor(*(mesh.colour or (0.7, 0.7, 0.7)))
    look.SetAmbient(0.25)
    look.SetDiffuse(0.8)
    look.SetSpecular(0.6)
    look.SetSpecularPower(mesh.shine)
    look.SetOpacity(1 - mesh.transparency)
    return actor


def _shadow(actor: vtk.vtkActor) -> vtk.vtkActor:
    """The same triangles, to be cast on the belt."""
    shadow = vtk.vtkActor()
    shadow.SetMapper(actor.GetMapper())
    shadow.GetProperty().LightingOff()
    return shadow


def _belt(image: vtk.vtkImageData) -> vtk.vtkActor:
    plane = vtk.vtkPlaneSource()
    plane.SetOrigin(-_BELT, -_BELT, 0)
    plane.SetPoint1(_BELT, -_BELT, 0)
    plane.SetPoint2(-_BELT, _BELT, 0)
    mapper = vtk.vtkPolyDataMapper()
    mapper.SetInputConnection(plane.GetOutputPort())
    surface = vtk.vtkTexture()
    surface.SetInputData(image)
    surface.InterpolateOn()
    belt = vtk.vtkActor()
    belt.SetMapper(mapper)
    belt.SetTexture(surface)
    belt.GetProperty().SetAmbient(0.5)
    belt.GetProperty().SetDiffuse(0.6)
    return belt
