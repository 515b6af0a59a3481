//! `ssi-hv pki`.

use std::fmt::Write as _;
use std::path::Path;

use fabric_identity::{Credentials, Subject};
use fabric_pki::{Authority, Entry, Request, State, Validity, date_text, request};
use ssi_hv::exit::ExitCode;

use super::{Failure, print};
use crate::cli::pki::{PkiCommand, Revocable};

/// Follows a command of `ssi-hv pki`.
pub fn pki(command: &PkiCommand) -> Result<ExitCode, Failure> {
    let text = match command {
        PkiCommand::Init(config) => {
            let validity = Validity { days: config.days };
            let cluster = config.cluster.clone();
            let authority = Authority::create(&config.authority, cluster, validity)?;
            let path = config.authority.display();
            format!(
                "authority of the cluster {}: {path}\n\
                 {path}/ca.key signs certificates: whoever has it is every member. Keep it here.\n",
                authority.cluster()
            )
        }
        PkiCommand::Issue(config) => {
            let mut authority = Authority::open(&config.authority)?;
            let entry = authority.issue(&config.holder, config.validity.into(), &config.output)?;
            written(&entry, &config.output)
        }
        PkiCommand::Request(config) => {
            let subject = Subject {
                cluster: config.cluster.clone(),
                holder: config.holder.clone(),
            };
            let path = request(&subject, &config.output)?;
            format!(
                "{}\nsign it on the authority's host: ssi-hv pki sign AUTHORITY {} {} -o DIRECTORY\n",
                path.display(),
                path.file_name().unwrap_or_default().display(),
                config.holder
            )
        }
        PkiCommand::Sign(config) => {
            let request = Request::read(&config.request)?;
            let mut authority = Authority::open(&config.authority)?;
            let validity = config.validity.into();
            let entry = authority.sign(&request, &config.holder, validity, &config.output)?;
            written(&entry, &config.output)
        }
        PkiCommand::Renew(config) => {
            let mut authority = Authority::open(&config.authority)?;
            let validity = config.validity.into();
            let entry = authority.renew(&config.certificate, validity, &config.output)?;
            written(&entry, &config.output)
        }
        PkiCommand::Revoke(config) => {
            let mut authority = Authority::open(&config.authority)?;
            let mut text = String::new();
            match &config.what {
                Revocable::Serial(serial) => {
                    authority.revoke(serial)?;
                    let _ = writeln!(text, "{serial} is revoked");
                }
                Revocable::Holder(holder) => {
                    for serial in authority.revoke_holder(holder)? {
                        let _ = writeln!(text, "{serial} of {holder} is revoked");
                    }
                }
            }
            let path = config.authority.join("crl.pem");
            let _ = writeln!(
                text,
                "copy {} to every member; nodes read it after `ssi-hv node reload`, VMs by themselves",
                path.display()
            );
            text
        }
        PkiCommand::List(config) => {
            let authority = Authority::open(&config.authority)?;
            if config.json {
                json(&authority)
            } else {
                table(&authority)
            }
        }
        PkiCommand::Verify(config) => verified(&Credentials::load(&config.credentials)?),
    };
    print(&text)?;
    Ok(ExitCode::Success)
}

fn written(entry: &Entry, output: &Path) -> String {
    format!(
        "{} of {}, valid until {}: {}\n",
        entry.serial,
        entry.holder,
        date_text(entry.not_after),
        output.display()
    )
}

const fn word(state: State) -> &'static str {
    match state {
        State::Valid => "valid",
        State::Expired => "expired",
        State::Revoked => "revoked",
    }
}

fn table(authority: &Authority) -> String {
    let mut text = format!(
        "{:<32}  {:<8}  {:<20}  holder\n",
        "serial", "state", "until"
    );
    for (entry, state) in authority.entries() {
        let until = date_text(entry.not_after);
        let _ = writeln!(
            text,
            "{}  {:<8}  {until:<20}  {}",
            entry.serial,
            word(state),
            entry.holder
        );
    }
    text
}

fn json(authority: &Authority) -> String {
    let certificates: Vec<_> = authority
        .entries()
        .map(|(entry, state)| {
            serde_json::json!({
                "serial": entry.serial.to_string(),
                "holder": entry.holder.to_string(),
                "state": word(state),
                "not_after": entry.not_after,
                "revoked": entry.revoked,
            })
        })
        .collect();
    let list = serde_json::json!({
        "cluster": authority.cluster().as_str(),
        "certificates": certificates,
    });
    format!("{list:#}\n")
}

fn verified(credentials: &Credentials) -> String {
    let presented = credentials.presented();
    let serial = fabric_pki::Serial::from_bytes(&presented.serial);
    format!(
        "{}\nserial       {serial}\nvalid from   {}\nvalid until  {}\nfingerprint  {}\n",
        presented.subject,
        date_text(presented.not_before),
        date_text(presented.not_after),
        credentials.fingerprint()
    )
}
