//! Sockets between guest and host in textual form: `cid=N,path=SOCKET`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use devices::virtio::{VSOCK_CID_MAX, VSOCK_CID_MIN};

use super::text::serde_as_text;

/// The guest's address, and the socket of the host that leads to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockArg {
    /// The guest's address.
    pub cid: u32,
    /// The Unix socket of the host.
    pub path: PathBuf,
}

/// A text that is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseVsockError {
    /// There is no address, or it is none that a guest can have.
    #[error(
        "`{text}` has no cid= from {VSOCK_CID_MIN} to {VSOCK_CID_MAX}; write cid=N,path=SOCKET, such as \
         cid=3,path=/tmp/vm.vsock"
    )]
    Cid {
        /// What was given.
        text: String,
    },
    /// There is no path.
    #[error("`{text}` has no path of the host's socket; write cid=N,path=SOCKET")]
    Path {
        /// What was given.
        text: String,
    },
    /// An option is unknown or repeated.
    #[error("`{option}` is not an option of a vsock, or not twice; write cid=N,path=SOCKET")]
    Option {
        /// The invalid part.
        option: String,
    },
}

impl FromStr for VsockArg {
    type Err = ParseVsockError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut cid, mut path) = (None, None);
        for option in text.split(',') {
            let first = match option.split_once('=') {
                Some(("cid", value)) => cid.replace(value).is_none(),
                Some(("path", value)) => path.replace(value).is_none(),
                _ => false,
            };
            if !first {
                return Err(ParseVsockError::Option {
                    option: option.into(),
                });
            }
        }
        let cid = cid
            .and_then(|cid| cid.parse().ok())
            .filter(|cid| (VSOCK_CID_MIN..=VSOCK_CID_MAX).contains(cid));
        let path = path.filter(|path| !path.is_empty());
        let text = || text.to_owned();
        Ok(Self {
            cid: cid.ok_or_else(|| ParseVsockError::Cid { text: text() })?,
            path: path
                .ok_or_else(|| ParseVsockError::Path { text: text() })?
                .into(),
        })
    }
}

impl fmt::Display for VsockArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cid={},path={}", self.cid, self.path.display())
    }
}

serde_as_text!(VsockArg);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_address_and_a_path_in_any_order_are_read() {
        let wanted = VsockArg {
            cid: 3,
            path: "/tmp/v.sock".into(),
        };
        for text in ["cid=3,path=/tmp/v.sock", "path=/tmp/v.sock,cid=3"] {
            assert_eq!(text.parse(), Ok(wanted.clone()));
        }
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let refused = |text: &str| text.parse::<VsockArg>().expect_err(text).to_string();
        for text in [
            "path=a",
            "cid=,path=a",
            "cid=2,path=a",
            "cid=4294967295,path=a",
            "cid=x,path=a",
        ] {
            assert!(refused(text).contains("from 3 to 4294967294"), "{text}");
        }
        for text in ["cid=3", "cid=3,path="] {
            assert!(refused(text).contains("has no path"), "{text}");
        }
        assert!(refused("cid=3,path=a,port=1").contains("`port=1` is not an option"));
        assert!(refused("cid=3,cid=3,path=a").contains("not twice"));
        assert!(refused("").contains("`` is not an option"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,60}") {
            let _ = text.parse::<VsockArg>();
        }

        #[test]
        fn what_is_printed_is_read_as_the_same(cid in 3_u32..u32::MAX, path in "[^,]{1,20}") {
            let vsock = VsockArg { cid, path: path.into() };
            prop_assert_eq!(vsock.to_string().parse(), Ok(vsock));
        }
    }
}
