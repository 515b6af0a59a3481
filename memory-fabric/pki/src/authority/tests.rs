use super::*;
use fabric_identity::Credentials;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

const YEAR: Validity = Validity { days: 365 };

fn authority(cluster: &str) -> (TempDir, Authority) {
    let directory = tempfile::tempdir().unwrap();
    let validity = Validity { days: 3_650 };
    let authority = Authority::create(directory.path(), cluster.parse().unwrap(), validity);
    (directory, authority.unwrap())
}

fn holder(text: &str) -> Holder {
    text.parse().unwrap()
}

#[test]
fn a_member_of_two_authorities_stays_one_when_its_certificate_is_replaced() {
    let (old_directory, mut old) = authority("prod");
    let (new_directory, mut new) = authority("prod");
    let members = tempfile::tempdir().unwrap();
    let at = |name: &str| members.path().join(name);
    new.issue(&holder("node/alpha"), YEAR, &at("alpha"))
        .unwrap();
    old.issue(&holder("vm/web"), YEAR, &at("web")).unwrap();
    for file in [AUTHORITIES_FILE, REVOKED_FILE] {
        let both = [&old_directory, &new_directory];
        let both = both.map(|one| std::fs::read_to_string(one.path().join(file)).unwrap());
        std::fs::write(at("alpha").join(file), both.concat()).unwrap();
    }
    let web = credentials::certificates(&at("web").join("cert.pem")).unwrap();
    let gone = new.issue(&holder("vm/gone"), YEAR, &at("gone"));
    new.revoke(&gone.unwrap().serial).unwrap();
    let gone = credentials::certificates(&at("gone").join("cert.pem")).unwrap();
    for _ in 0..2 {
        let renewed = new.renew(&at("alpha").join("cert.pem"), YEAR, &at("alpha"));
        renewed.unwrap();
        let alpha = Credentials::load(&at("alpha")).unwrap();
        alpha.confirm(&web).expect("of the old authority");
        alpha.confirm(&gone).expect_err("by the new list");
        let lists = std::fs::read_to_string(at("alpha").join(REVOKED_FILE)).unwrap();
        assert_eq!(lists.matches("BEGIN X509 CRL").count(), 2, "one of each");
    }
    // Who trusts one authority gets the files of that one.
    let renewed = old.renew(&at("web").join("cert.pem"), YEAR, &at("web"));
    renewed.unwrap();
    let trusted = std::fs::read(at("web").join(AUTHORITIES_FILE)).unwrap();
    let own = std::fs::read(old_directory.path().join(AUTHORITIES_FILE)).unwrap();
    assert_eq!(trusted, own);
}

#[test]
fn no_certificate_of_a_revoked_holder_leads_to_another_one() {
    let (_directory, mut authority) = authority("prod");
    let members = tempfile::tempdir().unwrap();
    let (web, shown) = (members.path().join("web"), members.path().join("old.pem"));
    authority.issue(&holder("vm/web"), YEAR, &web).unwrap();
    std::fs::copy(web.join("cert.pem"), &shown).unwrap();
    authority.renew(&web.join("cert.pem"), YEAR, &web).unwrap();
    // The first has expired.
    authority.ledger.entries[0].not_after = 0;
    assert_eq!(authority.revoke_holder(&holder("vm/web")).unwrap().len(), 2);
    for shown in [shown, web.join("cert.pem")] {
        let renewed = authority.renew(&shown, YEAR, &members.path().join("new"));
        assert!(
            matches!(renewed, Err(PkiError::Revoked { .. })),
            "{renewed:?}"
        );
    }
}

#[test]
fn what_is_issued_is_confirmed_by_its_authority_alone() {
    let (_directory, mut authority) = authority("prod");
    let members = tempfile::tempdir().unwrap();
    for name in ["node/alpha", "vm/web", "operator/eve"] {
        let path = members.path().join(name);
        authority.issue(&holder(name), YEAR, &path).unwrap();
        let credentials = Credentials::load(&path).unwrap();
        let text = format!("spiffe://prod/ssi-hv/{name}");
        assert_eq!(credentials.subject().to_string(), text);
    }
    let (other, _) = super::tests::authority("prod");
    let path = members.path().join("node/alpha");
    std::fs::copy(
        other.path().join(AUTHORITIES_FILE),
        path.join(AUTHORITIES_FILE),
    )
    .unwrap();
    let error = Credentials::load(&path).unwrap_err().to_string();
    assert!(error.contains("not confirmed"), "{error}");
}

#[test]
fn a_request_keeps_its_key_and_is_signed_for_the_named_holder_only() {
    let (_directory, mut authority) = authority("prod");
    let member = tempfile::tempdir().unwrap();
    let subject = "spiffe://prod/ssi-hv/node/alpha".parse().unwrap();
    let path = member::request(&subject, member.path()).unwrap();
    let key = std::fs::read(member.path().join("key.pem")).unwrap();
    let request = Request::read(&path).unwrap();
    let wrong = authority.sign(&request, &holder("vm/alpha"), YEAR, member.path());
    let error = wrong.unwrap_err().to_string();
    assert!(error.contains("node/alpha, and not for"), "{error}");
    let signed = authority.sign(&request, &holder("node/alpha"), YEAR, member.path());
    signed.unwrap();
    assert_eq!(std::fs::read(member.path().join("key.pem")).unwrap(), key);
    Credentials::load(member.path()).unwrap();
    let again = member::request(&subject, member.path()).unwrap_err();
    assert!(matches!(again, PkiError::Exists(_)), "{again}");

    let elsewhere = tempfile::tempdir().unwrap();
    let subject = "spiffe://lab/ssi-hv/node/alpha".parse().unwrap();
    let path = member::request(&subject, elsewhere.path()).unwrap();
    let request = Request::read(&path).unwrap();
    let signed = authority.sign(&request, &holder("node/alpha"), YEAR, member.path());
    assert!(matches!(signed, Err(PkiError::OtherIdentity { .. })));
}

#[test]
fn a_request_that_was_changed_is_refused() {
    let member = tempfile::tempdir().unwrap();
    let subject = "spiffe://prod/ssi-hv/node/alpha".parse().unwrap();
    let path = member::request(&subject, member.path()).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    for at in (40..text.len() - 40).step_by(7) {
        let mut bytes = text.clone().into_bytes();
        bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(request) = Request::read(&path) {
            panic!("byte {at} of {} was changed: {request:?}", text.len());
        }
    }
}

#[test]
fn a_revoked_certificate_is_refused_with_the_new_list_and_cannot_be_renewed() {
    let (directory, mut authority) = authority("prod");
    let member = tempfile::tempdir().unwrap();
    let issued = authority.issue(&holder("vm/web"), YEAR, member.path());
    let serial = issued.unwrap().serial;
    authority.revoke(&serial).unwrap();
    // Again, as after a command that was interrupted.
    authority.revoke(&serial).unwrap();
    Credentials::load(member.path()).expect("the old list");
    std::fs::copy(
        directory.path().join(REVOKED_FILE),
        member.path().join(REVOKED_FILE),
    )
    .unwrap();
    let error = Credentials::load(member.path()).unwrap_err().to_string();
    assert!(
        error.contains("revoked") || error.contains("Revoked"),
        "{error}"
    );
    let renewed = authority.renew(&member.path().join("cert.pem"), YEAR, member.path());
    assert!(matches!(renewed, Err(PkiError::Revoked { .. })));
    let states: Vec<_> = authority.entries().map(|(_, state)| state).collect();
    assert_eq!(states, [State::Revoked]);
    drop(authority);
    let mut authority = Authority::open(directory.path()).unwrap();
    let nothing = authority.revoke_holder(&holder("vm/other"));
    assert!(matches!(nothing, Err(PkiError::NothingValid(_))));
}

#[test]
fn a_revocation_that_ended_before_its_list_was_written_is_repeated() {
    let (directory, mut authority) = authority("prod");
    let member = tempfile::tempdir().unwrap();
    let issued = authority.issue(&holder("vm/web"), YEAR, member.path());
    let issued = issued.unwrap();
    let list = directory.path().join(REVOKED_FILE);
    let before = std::fs::read(&list).unwrap();
    authority.revoke_holder(&holder("vm/web")).unwrap();
    // As after a crash between both files.
    std::fs::write(&list, before).unwrap();
    let again = authority.revoke_holder(&holder("vm/web")).unwrap();
    assert_eq!(again, [issued.serial]);
    std::fs::copy(&list, member.path().join(REVOKED_FILE)).unwrap();
    let error = Credentials::load(member.path()).unwrap_err().to_string();
    assert!(error.contains("not confirmed"), "{error}");
}

#[test]
fn a_certificate_with_the_name_and_number_of_another_is_not_renewed() {
    let (_directory, mut authority) = authority("prod");
    let members = tempfile::tempdir().unwrap();
    let path = members.path().join("web");
    let issued = authority.issue(&holder("vm/web"), YEAR, &path).unwrap();
    // What a peer of it has seen, with a key of its own.
    let subject = "spiffe://prod/ssi-hv/vm/web".parse().unwrap();
    let mut parameters = member::parameters(&subject).unwrap();
    parameters.serial_number = Some(SerialNumber::from_slice(issued.serial.bytes()));
    parameters.not_after = date(issued.not_after).unwrap();
    let forged = parameters
        .self_signed(&KeyPair::generate().unwrap())
        .unwrap();
    let shown = members.path().join("forged.pem");
    std::fs::write(&shown, forged.pem()).unwrap();
    let renewed = authority.renew(&shown, YEAR, &members.path().join("new"));
    assert!(
        matches!(renewed, Err(PkiError::NotIssued { .. })),
        "{renewed:?}"
    );
    let renewed = authority.renew(&path.join("cert.pem"), YEAR, &path);
    renewed.unwrap();
}

#[test]
fn a_renewed_certificate_has_the_same_key_and_another_number() {
    let (directory, mut authority) = authority("prod");
    let member = tempfile::tempdir().unwrap();
    let first = authority.issue(&holder("node/a"), Validity { days: 1 }, member.path());
    let first = first.unwrap();
    drop(authority);
    let mut authority = Authority::open(directory.path()).unwrap();
    let second = authority.renew(&member.path().join("cert.pem"), YEAR, member.path());
    let second = second.unwrap();
    assert_ne!(first.serial, second.serial);
    let credentials = Credentials::load(member.path()).unwrap();
    assert_eq!(credentials.presented().not_after, second.not_after);
    let revoked = authority.revoke_holder(&holder("node/a")).unwrap();
    assert_eq!(revoked, [first.serial, second.serial]);
}

#[test]
fn a_certificate_of_another_authority_is_not_renewed() {
    let (_directory, mut authority) = authority("prod");
    let (_other_directory, mut other) = super::tests::authority("prod");
    let member = tempfile::tempdir().unwrap();
    other.issue(&holder("node/a"), YEAR, member.path()).unwrap();
    let renewed = authority.renew(&member.path().join("cert.pem"), YEAR, member.path());
    assert!(matches!(renewed, Err(PkiError::NotIssued { .. })));
}

#[test]
fn no_certificate_outlives_its_authority() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = "prod".parse().unwrap();
    let mut authority =
        Authority::create(directory.path(), cluster, Validity { days: 30 }).unwrap();
    let member = tempfile::tempdir().unwrap();
    let error = authority.issue(&holder("vm/web"), Validity { days: 31 }, member.path());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("31 days"), "{error}");
    let issued = authority.issue(&holder("vm/web"), Validity { days: 29 }, member.path());
    issued.unwrap();
    let end = Authority::create(directory.path(), "lab".parse().unwrap(), YEAR);
    drop(authority);
    assert!(matches!(end, Err(PkiError::Locked { .. })), "{end:?}");
    let again = Authority::create(directory.path(), "lab".parse().unwrap(), YEAR);
    assert!(matches!(again, Err(PkiError::Exists(_))), "{again:?}");
}

#[test]
fn a_key_that_others_may_read_or_that_is_another_ones_is_refused() {
    let (directory, authority) = authority("prod");
    drop(authority);
    let path = directory.path().join(KEY_FILE);
    let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode));
    mode(0o644).unwrap();
    let error = Authority::open(directory.path()).unwrap_err().to_string();
    assert!(error.contains("chmod 600"), "{error}");
    let (other, _) = super::tests::authority("prod");
    mode(0o600).unwrap();
    std::fs::copy(other.path().join(KEY_FILE), &path).unwrap();
    let error = Authority::open(directory.path()).unwrap_err().to_string();
    assert!(error.contains("not the key of"), "{error}");
}

#[test]
fn what_is_not_issued_is_not_listed() {
    let (_directory, mut authority) = authority("prod");
    let member = tempfile::tempdir().unwrap();
    authority
        .issue(&holder("vm/web"), YEAR, member.path())
        .unwrap();
    let again = authority.issue(&holder("vm/web"), YEAR, member.path());
    assert!(matches!(again, Err(PkiError::Exists(_))), "{again:?}");
    let nowhere = member.path().join("cert.pem/below");
    let nowhere = authority.issue(&holder("vm/web"), YEAR, &nowhere);
    assert!(matches!(nowhere, Err(PkiError::Directory { .. })));
    assert_eq!(authority.entries().count(), 1);
}

#[test]
fn a_newer_list_counts_wherever_it_is_in_the_file() {
    let (directory, mut authority) = authority("prod");
    let (other_directory, _other) = super::tests::authority("lab");
    let member = tempfile::tempdir().unwrap();
    authority
        .issue(&holder("vm/web"), YEAR, member.path())
        .unwrap();
    let read = |directory: &TempDir| std::fs::read(directory.path().join(REVOKED_FILE)).unwrap();
    let (old, of_other) = (read(&directory), read(&other_directory));
    let load = |lists: &[&[u8]]| {
        std::fs::write(member.path().join(REVOKED_FILE), lists.concat()).unwrap();
        Credentials::load(member.path())
    };
    load(&[&old, &of_other]).unwrap();
    authority.revoke_holder(&holder("vm/web")).unwrap();
    let new = read(&directory);
    for lists in [[&old, &of_other, &new], [&new, &of_other, &old]] {
        let error = load(&lists.map(Vec::as_slice)).unwrap_err().to_string();
        assert!(error.contains("not confirmed"), "{error}");
    }
}
