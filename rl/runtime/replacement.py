"""Replacement of functions, methods and classes of other libraries, such as vLLM."""


def replace_attribute(owner: object, name: str, replacement: object) -> None:
    """Replace an attribute of another library's module, class or object.

    Raises AttributeError if it has no such attribute. For example, another version of the library may have
    renamed it; an assignment would then add a name that nothing calls.
    """
    getattr(owner, name)
    setattr(owner, name, replacement)
