"""Putting a whole folder in place so that a kill at any moment leaves the old one or the new one, whole.

The new folder is built beside the target under a hidden name, flushed to disk, and swapped in by one system call
(`renameat2(RENAME_EXCHANGE)` on Linux, `renamex_np(RENAME_SWAP)` on macOS). File systems without it get two renames;
the moment between them is healed by `recover`, which every reader calls first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medusa_train.errors import UserError
from medusa_train.provenance import fsync_folder

_ATTEMPTS = 20
_STAGED, _RETIRED = "tmp", "old"
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EXDEV}


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`; a clean exit flushes it and swaps it in, an exception removes it.

    Errors of the disk (full, read-only, no permission) become a `UserError`; `target` is untouched by them.
    """
    target = Path(os.path.realpath(target))
    check_not_cached(target)
    staged = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target)
        staged = _sibling(target, _STAGED)
        staged.mkdir()
        yield staged
        _usual_modes(staged)
        fsync_tree(staged)
        _put_in_place(staged, target)
    except OSError as error:
        raise UserError(
            f"cannot write the checkpoint: {error.strerror or error}",
            where=str(error.filename or target),
            fix="free space on the disk or choose another folder; what stood there before is untouched",
        ) from error
    finally:
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)


def check_not_cached(folder: Path) -> None:
    """Refuses to write into a snapshot of the Hugging Face hub's cache, which other programs share.

    Raises:
        UserError: `folder` is one, or lies in one.
    """
    folder = Path(os.path.realpath(folder))
    for place in (folder, *folder.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith(("models--", "datasets--")):
            raise UserError(
                "this folder belongs to the hub's cache, and nothing is written there",
                where=str(folder),
                fix="make a copy of your own with `hf download OWNER/NAME --local-dir DIR` and name that folder",
            )


def _usual_modes(folder: Path) -> None:
    """Gives the tensor files the mode that the process's umask gives any new file; safetensors makes them 0600."""
    probe = folder / f".mode-{uuid.uuid4().hex}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            path.chmod(mode)


def fsync_tree(folder: Path) -> None:
    """Flushes every file below `folder`, then the folders themselves, innermost first."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            if os.path.islink(os.path.join(parent, name)):  # somebody's link, perhaps to nowhere
                continue
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_folder(parent)


def link_or_copy(source: Path, target: Path) -> None:
    """The same bytes under a second name, by a hard link where the file system has them.

    Only for files whose first name goes away when the folder is swapped: two living names would share later edits.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def carry_over(folder: Path, staged: Path, leave: set[str]) -> set[str]:
    """Takes everything below `folder` along into `staged` but the relative paths in `leave`; returns what it took.

    Hidden folders, links and empty folders too: a checkpoint may be a git clone, and its history is not ours to drop.
    """
    taken: set[str] = set()
    for parent, folders, names in os.walk(folder):
        here = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in folders:
            if name not in links and (here / name).as_posix() not in leave:
                (staged / here / name).mkdir(parents=True, exist_ok=True)
        for name in (*names, *links):
            relative, source = (here / name).as_posix(), Path(parent) / name
            if relative in leave:
                continue
            taken.add(relative)
            if source.is_symlink():
                (staged / here).mkdir(parents=True, exist_ok=True)
                os.symlink(os.readlink(source), staged / here / name)
            else:
                link_or_copy(source, staged / here / name)
    return taken


def copy_file(source: Path, target: Path) -> None:
    """A copy of its own (content only), folders made as needed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def recover(target: Path) -> None:
    """Heals a swap that was cut between its two renames: the retired folder goes back to its name."""
    target = Path(os.path.realpath(target))
    if target.exists() or not target.parent.is_dir():
        return
    for retired in sorted(target.parent.glob(f".{_escape(target.name)}.{_RETIRED}-*")):
        try:
            os.rename(retired, target)
        except OSError:
            continue
        return


def sweep(target: Path) -> None:
    """Removes what killed writers of this target left behind (never what a living one is writing)."""
    recover(target)
    for leftover in target.parent.glob(f".{_escape(target.name)}.*-*"):
        kind, _, rest = leftover.name.removeprefix(f".{target.name}.").partition("-")
        owner = rest.partition("-")[0]
        if kind in (_STAGED, _RETIRED) and owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)


def _put_in_place(staged: Path, target: Path) -> None:
    if not target.exists():
        os.rename(staged, target)
    elif not _exchange(staged, target):
        retired = _sibling(target, _RETIRED)
        for attempt in range(_ATTEMPTS):
            os.rename(target, retired)
            try:
                os.rename(staged, target)
                break
            except OSError as error:
                # A reader came between the two and put the old folder back (`recover`): retire it again.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _ATTEMPTS - 1:
                    raise
        fsync_folder(target.parent)
        # Under its staged name it can no longer be mistaken for the other half of a cut swap while it is being removed.
        os.rename(retired, staged)
    fsync_folder(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one system call; False where the system or the file system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        one, two = os.fsencode(first), os.fsencode(second)
        if sys.platform.startswith("linux"):
            at_cwd, rename_exchange = -100, 2
            failed = libc.renameat2(at_cwd, one, at_cwd, two, rename_exchange)
        elif sys.platform == "darwin":
            rename_swap = 2
            failed = libc.renamex_np(one, two, rename_swap)
        else:
            return False
    except (OSError, AttributeError, TypeError):
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _sibling(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _escape(name: str) -> str:
    import glob

    return glob.escape(name)


def _alive(process: int) -> bool:
    import psutil

    return psutil.pid_exists(process)
