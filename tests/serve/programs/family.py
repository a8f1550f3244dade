"""What the programs of langchain ask of a model: a tool, and a structure with a text that fills it."""

from langchain_core.tools import tool
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


class Family(BaseModel):
    """The members of a family."""

    parents: list[Person]
    child: Person


@tool
def multiply(a: int, b: int) -> int:
    """Multiply a and b."""
    return a * b


text = "Ann is 40, Bob is 41, and their child Cid is 9. Answer with a JSON object of parents and child, " \
       "each of them with name and age."
