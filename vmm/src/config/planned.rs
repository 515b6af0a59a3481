//! Flags that are planned: using one gives a clear answer.

/// A planned flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The command it belongs to.
    pub command: &'static str,
    /// Its name on the command line.
    pub name: &'static str,
    /// The present alternative.
    pub instead: &'static str,
}

const fn planned(command: &'static str, name: &'static str, instead: &'static str) -> Planned {
    Planned {
        command,
        name,
        instead,
    }
}

/// Planned flags.
const FLAGS: [Planned; 1] = [planned(
    "run",
    "--rebalance",
    "`ssi-hv rebalance VM --add HOST:PORT` gives a donor that joins its share of the memory",
)];

/// Returns the planned flag of this name, with its dashes, of `command`.
#[must_use]
pub fn flag(command: &str, name: &str) -> Option<&'static Planned> {
    FLAGS
        .iter()
        .find(|planned| planned.command == command && planned.name == name)
}
