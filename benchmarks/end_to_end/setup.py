"""What the client is told: where everybody is, and how much to ask."""

from mdp.files import Record
from mdp.formats.plan import Encoding


class HttpMember(Record, frozen=True):
    address: str
    port: int
    image_size: int
    encoding: Encoding


class Amount(Record, frozen=True):
    rounds: int
    #: Pictures one at a time, in each round.
    per_round: int
    #: Of everybody's own answers, how many seconds' worth are asked for at once, in each round.
    stream_s: float
    stream_rounds: int
    in_flight: int


class Setup(Record, frozen=True):
    pictures: list[str]
    image_size: int
    #: MDP fleets: row's name -> fleet file.
    fleets: dict[str, str]
    #: First stage of the whole teacher and of the pipeline, and where its last one answers.
    teacher: str
    teacher_reply: str
    pipeline: str
    pipeline_reply: str
    http: list[HttpMember]
    #: Command that prints how many bytes each machine has sent.
    counting: list[str]
    amount: Amount
