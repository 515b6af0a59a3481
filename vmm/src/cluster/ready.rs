//! The output of a node that listens, from which `ssi-hv up` detects that it is ready.

use std::net::SocketAddr;

use memory_fabric::fabric::Fingerprint;

use crate::size::ByteSize;

const LENDING: &str = "lending ";
const ON: &str = " on ";
const FINGERPRINT: &str = "on UDP as fingerprint=";

/// Returns the line of a listening node, without its newline.
#[must_use]
pub fn listening(memory: ByteSize, address: SocketAddr) -> String {
    format!("{LENDING}{memory}{ON}{address}")
}

/// Returns the line that follows if the node also listens on UDP.
#[must_use]
pub fn fingerprint(fingerprint: &Fingerprint) -> String {
    format!("{FINGERPRINT}{fingerprint}")
}

/// Parses the address in the line of a listening node; returns `None` for any other line.
#[must_use]
pub fn read_listening(line: &str) -> Option<SocketAddr> {
    let (_, address) = line.strip_prefix(LENDING)?.rsplit_once(ON)?;
    address.parse().ok()
}

/// Parses the fingerprint in a line, if it has one.
#[must_use]
pub fn read_fingerprint(line: &str) -> Option<Fingerprint> {
    line.strip_prefix(FINGERPRINT)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_prints_is_read_and_other_lines_are_not() {
        for text in ["127.0.0.1:7000", "[::1]:7000"] {
            let address = text.parse().expect("an address");
            let line = listening(ByteSize::from_mib(64), address);
            assert_eq!(read_listening(&line), Some(address), "{line}");
        }
        let printed = "0b".repeat(32).parse().expect("a fingerprint");
        let line = fingerprint(&printed);
        assert_eq!(read_fingerprint(&line), Some(printed));
        for other in ["", "Welcome on board", "lending 1 GiB on nothing", &line] {
            assert_eq!(read_listening(other), None, "{other}");
        }
        assert_eq!(read_fingerprint("on UDP as fingerprint=0b"), None);
    }
}
