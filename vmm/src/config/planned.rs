//! Commands, flags and values that are planned: using one gives a clear answer.

/// A planned command, flag or value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The command it belongs to; empty for a command itself.
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

/// Planned commands.
const COMMANDS: [Planned; 1] = [planned(
    "",
    "pki",
    "until then nodes talk over loopback, or with --insecure",
)];

/// Planned flags.
const FLAGS: [Planned; 1] = [planned(
    "run",
    "--replicas",
    "each page has one copy, and a lost donor ends the guest",
)];

/// Returns the planned command of this name, under `parent` (empty at the top).
#[must_use]
pub fn command(parent: &str, name: &str) -> Option<&'static Planned> {
    find(&COMMANDS, parent, name)
}

/// Returns the planned flag of this name, with its dashes, of `command`.
#[must_use]
pub fn flag(command: &str, name: &str) -> Option<&'static Planned> {
    find(&FLAGS, command, name)
}

fn find(list: &'static [Planned], command: &str, name: &str) -> Option<&'static Planned> {
    list.iter()
        .find(|planned| planned.command == command && planned.name == name)
}
