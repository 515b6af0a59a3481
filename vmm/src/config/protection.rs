//! What connections to other hosts are protected by.

use super::RunConfig;

/// What connections to donors and nodes are protected by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Nothing, so they stay on this host.
    None,
    /// Nothing, which the user accepts.
    Insecure,
    /// Certificates, whatever the user would accept.
    Credentials,
}

impl Protection {
    /// Returns what follows from the flags.
    #[must_use]
    pub const fn of(has_credentials: bool, insecure: bool) -> Self {
        match (has_credentials, insecure) {
            (true, _) => Self::Credentials,
            (false, true) => Self::Insecure,
            (false, false) => Self::None,
        }
    }
}

impl RunConfig {
    /// The warning that connections to other hosts have no protection; `None` when all have one, or
    /// stay on this host.
    #[must_use]
    pub fn unprotected(&self) -> Option<String> {
        if self.credentials.is_some() || self.stays_on_this_host {
            return None;
        }
        let donors = self.donors.iter();
        let donors = donors.map(|donor| ("donor", &donor.name, donor.address));
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|node| ("node", &node.name, node.address));
        let exposed = donors.chain(nodes);
        let mut exposed = exposed.filter(|(_, _, address)| !address.ip().is_loopback());
        let (what, name, _) = exposed.next()?;
        let more = match exposed.count() {
            0 => String::new(),
            count => format!(" and {count} more"),
        };
        Some(format!(
            "--insecure: connections to {what} {name}{more} are neither authenticated nor \
             encrypted: any host on that network can read and change what they carry, except the \
             contents of sealed pages; give --credentials DIR, or use a private network"
        ))
    }
}
