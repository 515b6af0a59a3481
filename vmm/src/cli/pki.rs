//! `ssi-hv pki`: the authority of a cluster, and certificates of its members.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use fabric_identity::{Holder, Name};
use fabric_pki::{Serial, Validity};

/// Limit of `--days`: twenty years.
const DAYS_MAX: i64 = 7_300;

/// The commands of `ssi-hv pki`.
#[derive(Clone, Debug, Subcommand)]
pub enum PkiCommand {
    /// Create the authority of a cluster
    Init(InitConfig),
    /// Make a key and a certificate for it, on the authority's host
    Issue(IssueConfig),
    /// Make a key and a request for a certificate, on the member's host
    Request(RequestConfig),
    /// Make the certificate for a request
    Sign(SignConfig),
    /// Make a new certificate for the key of one that is about to expire
    Renew(RenewConfig),
    /// Revoke a certificate, or all of a holder
    Revoke(RevokeConfig),
    /// Show all certificates of the authority
    List(ListConfig),
    /// Check the certificate, key and authorities in a directory
    Verify(VerifyConfig),
}

/// For how long a certificate is valid.
#[derive(Clone, Copy, Debug, Args)]
pub struct ValidityArgs {
    /// Days for which the certificate is valid
    #[arg(
        long,
        value_name = "N",
        default_value_t = 365,
        value_parser = clap::value_parser!(u32).range(1..=DAYS_MAX)
    )]
    days: u32,
}

impl From<ValidityArgs> for Validity {
    fn from(args: ValidityArgs) -> Self {
        Self { days: args.days }
    }
}

/// The flags of `ssi-hv pki init`.
#[derive(Clone, Debug, Args)]
pub struct InitConfig {
    /// Directory to create the authority in; keep it on a host that you trust
    #[arg(value_name = "AUTHORITY")]
    pub authority: PathBuf,

    /// Name of the cluster, which every certificate contains
    #[arg(long, value_name = "NAME")]
    pub cluster: Name,

    /// Days for which the authority is valid
    #[arg(
        long,
        value_name = "N",
        default_value_t = 3_650,
        value_parser = clap::value_parser!(u32).range(1..=DAYS_MAX)
    )]
    pub days: u32,
}

/// The flags of `ssi-hv pki issue`.
#[derive(Clone, Debug, Args)]
pub struct IssueConfig {
    /// Directory of the authority
    #[arg(value_name = "AUTHORITY")]
    pub authority: PathBuf,

    /// Who gets it: node/NAME, vm/NAME or operator/NAME
    #[arg(value_name = "HOLDER")]
    pub holder: Holder,

    /// Directory to write key.pem, cert.pem, ca.pem and crl.pem to
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,

    #[command(flatten)]
    pub validity: ValidityArgs,
}

/// The flags of `ssi-hv pki request`.
#[derive(Clone, Debug, Args)]
pub struct RequestConfig {
    /// Who asks: node/NAME, vm/NAME or operator/NAME
    #[arg(value_name = "HOLDER")]
    pub holder: Holder,

    /// Name of the cluster
    #[arg(long, value_name = "NAME")]
    pub cluster: Name,

    /// Directory to write key.pem and request.pem to
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
}

/// The flags of `ssi-hv pki sign`.
#[derive(Clone, Debug, Args)]
pub struct SignConfig {
    /// Directory of the authority
    #[arg(value_name = "AUTHORITY")]
    pub authority: PathBuf,

    /// The request, as `ssi-hv pki request` wrote it
    #[arg(value_name = "REQUEST")]
    pub request: PathBuf,

    /// Who it is for, node/NAME, vm/NAME or operator/NAME; not taken from the request
    #[arg(value_name = "HOLDER")]
    pub holder: Holder,

    /// Directory to write cert.pem, ca.pem and crl.pem to
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,

    #[command(flatten)]
    pub validity: ValidityArgs,
}

/// The flags of `ssi-hv pki renew`.
#[derive(Clone, Debug, Args)]
pub struct RenewConfig {
    /// Directory of the authority
    #[arg(value_name = "AUTHORITY")]
    pub authority: PathBuf,

    /// The certificate to renew
    #[arg(value_name = "CERTIFICATE")]
    pub certificate: PathBuf,

    /// Directory to write cert.pem, ca.pem and crl.pem to
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,

    #[command(flatten)]
    pub validity: ValidityArgs,
}

/// The flags of `ssi-hv pki revoke`.
#[derive(Clone, Debug, Args)]
pub struct RevokeConfig {
    /// Directory of the authority
    #[arg(value_name = "AUTHORITY")]
    pub authority: PathBuf,

    /// A serial number, or node/NAME, vm/NAME or operator/NAME for all that it has
    #[arg(value_name = "CERTIFICATE", value_parser = revocable)]
    pub what: Revocable,
}

/// The flags of `ssi-hv pki list`.
#[derive(Clone, Debug, Args)]
pub struct ListConfig {
    /// Directory of the authority
    #[arg(value_name = "AUTHORITY")]
    pub authority: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The flags of `ssi-hv pki verify`.
#[derive(Clone, Debug, Args)]
pub struct VerifyConfig {
    /// Directory with cert.pem, key.pem, ca.pem and, if there is one, crl.pem
    #[arg(value_name = "DIRECTORY")]
    pub credentials: PathBuf,
}

/// What to revoke.
#[derive(Clone, Debug)]
pub enum Revocable {
    /// One certificate.
    Serial(Serial),
    /// All certificates of a holder.
    Holder(Holder),
}

fn revocable(text: &str) -> Result<Revocable, String> {
    if text.contains('/') {
        let holder = text.parse::<Holder>();
        return holder
            .map(Revocable::Holder)
            .map_err(|error| error.to_string());
    }
    let serial = text.parse::<Serial>();
    serial
        .map(Revocable::Serial)
        .map_err(|error| error.to_string())
}
