//! What is designed and not there yet: typing it gets an honest answer instead of a guess.

/// A command, flag or value that is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The command it belongs to; empty for a command itself.
    pub command: &'static str,
    /// What is typed.
    pub name: &'static str,
    /// What is there meanwhile.
    pub instead: &'static str,
}

const fn planned(command: &'static str, name: &'static str, instead: &'static str) -> Planned {
    Planned {
        command,
        name,
        instead,
    }
}

/// Commands that are planned.
const COMMANDS: [Planned; 1] = [planned(
    "",
    "pki",
    "until then nodes talk over loopback, or with --insecure",
)];

/// Flags that are planned.
const FLAGS: [Planned; 1] = [planned(
    "run",
    "--replicas",
    "each page has one copy, and a lost donor ends the guest",
)];

/// The planned command of this name, under `parent` (empty at the top).
#[must_use]
pub fn command(parent: &str, name: &str) -> Option<&'static Planned> {
    find(&COMMANDS, parent, name)
}

/// The planned flag of this name, with its dashes, of `command`.
#[must_use]
pub fn flag(command: &str, name: &str) -> Option<&'static Planned> {
    find(&FLAGS, command, name)
}

fn find(list: &'static [Planned], command: &str, name: &str) -> Option<&'static Planned> {
    list.iter()
        .find(|planned| planned.command == command && planned.name == name)
}
