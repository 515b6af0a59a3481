//! Is this host ready?
