"""Who trains together now: the one holder of the communicator, which everyone else asks."""

from offbeat.fabric.accounting import Account, Accounting
from offbeat.fabric.communicator import Communicator
from offbeat.fabric.host import Host


class Team:
    """The workers of a training, as one of them sees them.

    What depends on how many there are reads ``size`` when it is used, never once for all: that is
    what a team that changes will need. Nobody joins or leaves yet.

    Attributes:
        view: Number of this composition of the team; another one for each change.
        members: Their ranks.
        fabric: The communicator. Its bytes and waits are counted in ``account``.
        account: What the training has sent and waited.
    """

    def __init__(self, communicator: Communicator, *, account: Account | None = None) -> None:
        self.view = 0
        self.members = tuple(range(communicator.size))
        self.fabric = Accounting(communicator, account)
        self.account = self.fabric.account

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.fabric.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.members)

    @property
    def host(self) -> Host:
        """This worker's clock and activities."""
        return self.fabric.host

    @property
    def uncounted(self) -> Communicator:
        """The communicator for activities beside the training: bytes and waits of their own."""
        return self.fabric.inner

    def twin(self) -> "Team":
        """The same workers with an order of operations of their own, counted together.

        A collective.
        """
        return Team(self.fabric.inner.twin(), account=self.account)

    def close(self, *, together: bool = False) -> None:
        """Give connections, threads and descriptors back; see ``Communicator.close``."""
        self.fabric.close(together=together)
