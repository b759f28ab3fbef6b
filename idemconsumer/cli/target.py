"""MODULE:APP, found the way a person in that folder would expect."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from idemconsumer.app.app import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.missing import cannot_import
from idemconsumer.redaction import error_text


def load_app(target: str) -> App:
    """Import the module from the working directory, and take the App out of it. Raises ConfigurationError."""
    name, _, attribute = target.partition(":")
    module = _module(name)
    found = [key for key, value in vars(module).items() if isinstance(value, App)]
    suggestion = f"write {name}:{found[0]}" if found else "create one there with app = App('…')"
    if not attribute:
        raise ConfigurationError(f"{target!r} names a module but no app; {suggestion}")
    try:
        app = getattr(module, attribute)
    except AttributeError:
        raise ConfigurationError(f"module {name!r} has no {attribute!r}; {suggestion}") from None
    if not isinstance(app, App):
        raise ConfigurationError(f"{target} is {type(app).__name__}, not an App; {suggestion}")
    return app


def _module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if name.endswith(".py") or "/" in name:
        instead = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(f"{name!r} is a file; write the module's name, {instead}:app")
    try:
        return importlib.import_module(name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} ({_where(error)})") from error
    except SystemExit as error:
        raise ConfigurationError(
            f"{name!r} ends the process when it is imported ({_where(error)}); move that code under "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        missing = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and (name == missing or name.startswith(f"{missing}.")):
            raise ConfigurationError(f"there is no module {missing!r} in {folder}; write MODULE:APP") from None
        if isinstance(error, ImportError):
            raise cannot_import(repr(name), error, _where(error)) from error
        raise ConfigurationError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error_text(error)} ({_where(error)})"
        ) from error


def _where(error: BaseException) -> str:
    """The last line of the user's own code on the way to the error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    not_theirs = (str(Path(__file__).parent.parent), str(Path(importlib.__file__).parent), "<frozen", "<string>")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(not_theirs)]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else "while importing it"
