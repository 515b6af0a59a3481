//! Errors of userfaultfd.

/// Why no userfaultfd can be used.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    /// It could not be created.
    #[error(
        "cannot create a userfaultfd that serves kernel faults; run as root, or give the user \
         access to /dev/userfaultfd or the capability CAP_SYS_PTRACE"
    )]
    Create(#[source] userfaultfd::Error),
    /// The kernel lacks a feature.
    #[error("this kernel's userfaultfd lacks {0}; Linux 5.19 is the floor, 6.4 or newer is wanted")]
    Lacks(String),
    /// The kernel cannot poison pages.
    #[error(
        "the kernel of this host, Linux {release}, cannot poison lost pages, which takes 6.6 or \
         newer; boot a newer kernel, or use --on-lost-memory end"
    )]
    NoPoison {
        /// Its release.
        release: String,
    },
    /// A range could not be registered.
    #[error("userfaultfd did not accept {bytes} bytes of guest memory")]
    Register {
        /// Length of the range.
        bytes: usize,
        /// Its error.
        #[source]
        source: userfaultfd::Error,
    },
}
