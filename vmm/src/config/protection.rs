//! What connections to other hosts are protected by.

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
