//! The archives that apt is configured for.

use std::process::Command;

use crate::{ImageError, command};

const REMEDY: &str = "run \"apt-get update\" and try again";

/// Returns the Debian archives that apt is configured for, as lines of its sources.
pub(crate) fn debian() -> Result<Vec<String>, ImageError> {
    let targets = command::output(
        Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(ORIGIN)|$(COMPONENT)|$(REPO_URI)|$(RELEASE)",
            "Created-By: Packages",
        ]),
        "apt",
        REMEDY,
    )?;
    let sources = parse_targets(&String::from_utf8_lossy(&targets));
    if sources.is_empty() {
        return Err(ImageError::NoRelease);
    }
    Ok(sources)
}

/// Parses the output that [`debian`] requests. Only Debian's own main archive counts.
fn parse_targets(text: &str) -> Vec<String> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let fields: Vec<_> = line.split('|').collect();
        if let ["Debian", "main", uri, release] = fields[..] {
            let source = format!("deb {uri} {release} main");
            if !sources.contains(&source) {
                sources.push(source);
            }
        }
    }
    sources
}

/// Returns the address of the archive that the release among sources comes from.
pub(crate) fn mirror(sources: &[String]) -> Option<String> {
    let release = release(sources);
    let mut fields = sources
        .iter()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    fields.find_map(|line| {
        (line.get(2)? == &release).then(|| line.get(1).map(|uri| (*uri).to_owned()))?
    })
}

/// Returns the release among sources: other suites extend its name, such as `bookworm-updates`.
pub(crate) fn release(sources: &[String]) -> String {
    let names = sources.iter().filter_map(|line| line.split(' ').nth(2));
    names
        .min_by_key(|name| name.len())
        .unwrap_or_default()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debians_main_archive_is_taken_and_the_shortest_name_is_the_release() {
        let text = "Debian|main|http://d/security/|bookworm-security\n\
                    Debian|main|http://d/debian/|bookworm\nDebian|main|http://d/debian/|bookworm\n\
                    Debian|contrib|http://d/debian/|bookworm\nOther|main|http://o/|stable\n||http://x/|\n";
        let sources = parse_targets(text);
        let expected = [
            "deb http://d/security/ bookworm-security main",
            "deb http://d/debian/ bookworm main",
        ];
        assert_eq!(sources, expected);
        assert_eq!(release(&sources), "bookworm");
        assert_eq!(mirror(&sources).as_deref(), Some("http://d/debian/"));
        assert!(parse_targets("").is_empty());
        assert_eq!(mirror(&[]), None);
    }
}
