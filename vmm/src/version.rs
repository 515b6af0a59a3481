//! `ssi-hv --version -v`: what this build contains, and what it finds on this host.

use std::fmt::Write as _;
use std::path::Path;

use crate::doctor::{Finding, Host, Status, examine};

/// Checks of [`examine`] that concern the kernel rather than the size of the host.
const KERNEL_CHECKS: [&str; 7] = [
    "kernel",
    "kvm",
    "userfaultfd",
    "write protection",
    "memfd",
    "huge pages",
    "clock",
];

/// What RDMA finds here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rdma {
    /// The file of libibverbs, whose name ends with its version, or why there is none.
    library: Result<String, String>,
    /// A line for each port, or why there is none.
    ports: Result<Vec<String>, String>,
}

impl Rdma {
    fn find() -> Self {
        let library = memory_fabric::rdma::library_file();
        let ports = memory_fabric::rdma::summaries();
        Self {
            library: library
                .map(|file| shown(&file))
                .map_err(|error| error.to_string()),
            ports: ports
                .map(|ports| ports.iter().map(ToString::to_string).collect())
                .map_err(|error| error.to_string()),
        }
    }

    fn line(&self) -> String {
        if !cfg!(feature = "rdma") {
            return "not built in (cargo feature `rdma`)".to_owned();
        }
        let library = match &self.library {
            Ok(library) => library,
            Err(reason) => return format!("built in; {reason}"),
        };
        let found = match &self.ports {
            Ok(ports) if ports.is_empty() => "no device".to_owned(),
            Ok(ports) => ports.join("; "),
            Err(reason) => reason.clone(),
        };
        format!("built in; {library}; {found}")
    }
}

fn shown(file: &Path) -> String {
    file.display().to_string()
}

/// Returns the text of `ssi-hv --version -v`.
#[must_use]
pub fn text() -> String {
    format(&Rdma::find(), &examine(&Host::this()))
}

fn format(rdma: &Rdma, findings: &[Finding]) -> String {
    let mut text = format!("ssi-hv {}\n\ntransports\n", env!("CARGO_PKG_VERSION"));
    let udp = if cfg!(feature = "udp") {
        "built in; QUIC (RFC 9000), TLS 1.3"
    } else {
        "not built in (cargo feature `udp`)"
    };
    let rdma = rdma.line();
    let transports = [
        ("rdma", rdma.as_str()),
        ("tcp", "built in; TLS 1.3 with --credentials"),
        ("udp", udp),
        ("loopback", "built in"),
    ];
    // Writing to a string cannot fail.
    for (name, about) in transports {
        let _ = writeln!(text, "  {name:<18}{about}");
    }
    text.push_str("\nthis host\n");
    let checks = KERNEL_CHECKS.iter();
    for finding in checks.filter_map(|name| findings.iter().find(|found| found.check == *name)) {
        let status = match finding.status {
            Status::Ok => "",
            Status::Warning => "warning: ",
            Status::Missing => "missing: ",
        };
        let _ = writeln!(text, "  {:<18}{status}{}", finding.check, finding.detail);
    }
    text.push_str("\n`ssi-hv doctor` has all checks, and the commands that fix what is missing.\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rdma(ports: Result<Vec<String>, String>) -> Rdma {
        Rdma {
            library: Ok("/usr/lib/libibverbs.so.1.14.44.0".to_owned()),
            ports,
        }
    }

    #[test]
    #[cfg(feature = "rdma")]
    fn the_library_and_each_port_are_named() {
        let found = rdma(Ok(vec!["rxe0 port 1 active 10.0.0.1".to_owned()]));
        let line = found.line();
        assert_eq!(
            line,
            "built in; /usr/lib/libibverbs.so.1.14.44.0; rxe0 port 1 active 10.0.0.1"
        );
        assert!(rdma(Ok(Vec::new())).line().ends_with("; no device"));
        assert!(
            rdma(Err("no permission".to_owned()))
                .line()
                .ends_with("; no permission")
        );
        let without = Rdma {
            library: Err("libibverbs.so.1 cannot be loaded".to_owned()),
            ports: Ok(Vec::new()),
        };
        assert_eq!(without.line(), "built in; libibverbs.so.1 cannot be loaded");
    }

    #[test]
    fn every_check_of_the_kernel_exists_and_is_shown_with_its_status() {
        let findings = examine(&Host::this());
        let text = format(&rdma(Ok(Vec::new())), &findings);
        for check in KERNEL_CHECKS {
            let finding = findings.iter().find(|found| found.check == check);
            let finding = finding.unwrap_or_else(|| panic!("no check is called {check}"));
            let line = text
                .lines()
                .find(|line| line.starts_with(&format!("  {check} ")));
            let line = line.unwrap_or_else(|| panic!("{check} is not in:\n{text}"));
            assert!(line.ends_with(&finding.detail), "{line}");
            assert_eq!(
                line.contains("warning: "),
                finding.status == Status::Warning
            );
        }
        for transport in ["rdma", "tcp", "udp", "loopback"] {
            assert!(text.contains(&format!("\n  {transport} ")), "{text}");
        }
    }
}
